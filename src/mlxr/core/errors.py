"""Every error that mlxr raises on purpose, in one tree.

MlxrError
├── FormatError       a file of weights is broken or lies (names file, field and offset)
├── NotFound          a path or a model name that is not there
├── ModelError        a model that is inconsistent or of a kind we do not run
├── TokenizerError    a vocabulary that is inconsistent or of a kind we do not know
├── TemplateError     a chat template that is missing, broken or too large
│   └── ConversationRefused  the template compiles, but fails on this conversation or refuses it
├── NoTemplateWorker  no process can run a chat template, or it was ended before its work was done
├── DeviceError       a device or instruction set that this machine or build lacks
├── SettingError      a setting with an unknown name or a value it cannot take
├── RegistryError     the catalogue of models or a file in its store cannot be used as it is
│   ├── Unavailable   the catalogue cannot be read or changed now: another process holds it, or its disk fails
│   └── NoSpace       nothing can be written: the disk is full, or the folder is read-only
├── HubError          a hub cannot be reached, or sends something else than it listed
├── DoesNotFit        a model that does not fit in the memory set aside for models
├── NoReplica         a cluster has no replica that can take the request
├── EngineStopped     the engine is being stopped and takes no more requests
├── Busy              so much work of a kind is under way that no more is begun
├── TooComplex        the grammar of an answer became too complex while the answer grew
├── RequestFailed     a request that was accepted and ended without its result
└── InvalidRequest    a request that cannot be served as asked (names the field)
    ├── ContextFull   the prompt leaves no room for an answer in the context
    ├── AdaptersBusy  the adapters in use leave no memory for another one
    ├── OutOfPages    the request needs more cache pages than the arena has
    ├── NameTaken     a model or an adapter has that name, and the request does not replace it
    └── QueueFull     too many requests are waiting

Messages are one line: they name the thing, what is wrong with it and, where possible, a remedy. The command line prints
them as they are and ends with exit code 2; the server turns them into the API's own error.
"""

from __future__ import annotations

import shlex


class MlxrError(Exception):
    """Base of all errors raised on purpose. `str(error)` is one line for people."""


class FormatError(MlxrError):
    """A file of weights is broken: truncated, contradictory, hostile or of an unknown kind."""

    def __init__(self, path: object, field: str, offset: int | None, reason: str) -> None:
        self.path, self.field, self.offset, self.reason = str(path), field, offset, reason
        where = field if offset is None else f"{field} at byte {offset}"
        super().__init__(f"{self.path}: {where}: {reason}")


class NotFound(MlxrError):
    """A path or a model name that does not exist."""


class ModelError(MlxrError):
    """The model's configuration or tensors are inconsistent, or its architecture is not supported."""


class TokenizerError(MlxrError):
    """The vocabulary is inconsistent, or of a kind that is not supported."""


class TemplateError(MlxrError):
    """The chat template is missing, does not compile, fails, or writes without end."""


class ConversationRefused(TemplateError):
    """The chat template compiles and stays within its bounds, but it refuses this conversation, or fails on it."""


class NoTemplateWorker(MlxrError):
    """No process can run a chat template now: none starts, all stay busy, or the system ended those that tried.

    It says nothing about the template or the conversation, so the same request may succeed later.
    """


class DeviceError(MlxrError):
    """The device or instruction set asked for is not there."""


class SettingError(MlxrError):
    """A setting has an unknown name, or a value that it cannot take."""


class RegistryError(MlxrError):
    """The catalogue of models, or a file that it names, is broken, has changed or is of the wrong kind."""


class Unavailable(RegistryError):
    """The catalogue of models cannot be read or changed now; loaded models can still be used."""


class NoSpace(RegistryError):
    """Something has to be written, and the disk is full or the folder is read-only."""


class HubError(MlxrError):
    """A hub of models cannot be reached, refuses, or sends something else than it listed."""


class DoesNotFit(MlxrError):
    """A model needs more than the memory set aside for models, less that of pinned models."""

    def __init__(self, name: str, needed_bytes: int, budget_bytes: int, pinned_bytes: int) -> None:
        self.needed_bytes, self.budget_bytes, self.pinned_bytes = needed_bytes, budget_bytes, pinned_bytes
        pinned = f", of which pinned models take {pinned_bytes / 2**20:.0f} MiB" if pinned_bytes else ""
        super().__init__(
            f"{name}: needs {needed_bytes / 2**20:.0f} MiB for weights and the smallest cache, models may take "
            f"{budget_bytes / 2**20:.0f} MiB{pinned}; raise the setting models_memory_bytes, take a smaller model, or "
            "set expert_bytes for one with experts"
        )


class NoReplica(MlxrError):
    """No replica of the cluster can take the request: all are gone, or all that are there have been tried."""


class EngineStopped(MlxrError):
    """The engine is being stopped, or has stopped."""

    def __init__(self) -> None:
        super().__init__("the engine is being stopped and takes no more requests")


class Busy(MlxrError):
    """So much work of a kind is under way that no more is begun; try again after `retry_after_s` seconds."""

    retry_after_s = 5.0


class RequestFailed(MlxrError):
    """A request was accepted and ended without its result; `reason` is a FinishReason: cancelled, deadline or error."""

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(text)


TOO_COMPLEX = "the grammar became too complex while the answer grew"  # begins the error of such an answer


class TooComplex(MlxrError):
    """An answer cannot continue: its grammar has too many readings at this point. The caller can simplify it."""


class InvalidRequest(MlxrError):
    """The request cannot be served as it was asked; `field` names the offending part."""

    def __init__(self, field: str, reason: str) -> None:
        self.field, self.reason = field, reason
        super().__init__(f"{field}: {reason}")

    def rename(self, field: str) -> InvalidRequest:
        """The same error about `field`."""
        return type(self)(field, self.reason)


class ContextFull(InvalidRequest):
    """The prompt is so long that the context has no room for an answer; counts are None if not known."""

    def __init__(
        self, field: str, reason: str, prompt_tokens: int | None = None, context_tokens: int | None = None
    ) -> None:
        self.prompt_tokens, self.context_tokens = prompt_tokens, context_tokens
        super().__init__(field, reason)

    @classmethod
    def of(cls, field: str, prompt_tokens: int, context_tokens: int) -> ContextFull:
        """The error in words that clients look for."""
        reason = (
            f"this model's maximum context length is {context_tokens} tokens, which must hold the prompt of "
            f"{prompt_tokens} tokens and at least one token of the answer"
        )
        return cls(field, reason, prompt_tokens, context_tokens)

    def rename(self, field: str) -> ContextFull:
        """The same error about `field`."""
        return ContextFull(field, self.reason, self.prompt_tokens, self.context_tokens)


class OutOfPages(InvalidRequest):
    """The request needs more cache pages than the arena has."""

    def __init__(self, needed_pages: int, available_pages: int, page_size: int, setting: str = "arena_bytes") -> None:
        self.needed_pages, self.available_pages = needed_pages, available_pages
        super().__init__(
            "max_tokens",
            f"prompt and answer need {needed_pages} cache pages of {page_size} tokens, the arena has "
            f"{available_pages}; ask for fewer tokens or raise the setting {setting}",
        )


class NameTaken(InvalidRequest):
    """A model or an adapter has the name, and the request does not say that it may be replaced."""

    def __init__(self, field: str, name: str) -> None:
        super().__init__(
            field, f"{name} exists; choose another name, or replace it by --force (in a request: `replace` true)"
        )


class AdaptersBusy(InvalidRequest):
    """The adapters in use leave no memory for another one; try again after `retry_after_s` seconds."""

    retry_after_s = 1.0


class QueueFull(InvalidRequest):
    """Too many requests are waiting; try again after `retry_after_s` seconds."""

    def __init__(self, waiting: int, limit: int, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            "queue",
            f"{waiting} requests are waiting and {limit} may; try again in {retry_after_s:.0f} s or raise the "
            "setting max_waiting",
        )


def name_install(extra: str) -> str:
    """The command that installs the packages of an extra, such as `pip install 'mlx[cuda13]>=0.32.1'`.

    mlxr is on no package index, so the command names the packages that `pyproject.toml` lists for the extra.
    """
    from importlib.metadata import PackageNotFoundError, requires  # takes 8 ms, which most commands avoid

    try:
        found = [line.split(";", 1) for line in requires("mlxr") or ()]
    except PackageNotFoundError:  # the sources, without an installation
        found = []
    packages = [name.strip() for name, *condition in found if f'extra == "{extra}"' in "".join(condition)]
    return shlex.join(["pip", "install", *packages]) if packages else f"pip install '.[{extra}]' in the sources of mlxr"
