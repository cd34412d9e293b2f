"""LangChain's own tests of chat models, with the models of its three packages that speak our dialects.

The demo does not know what to call, so tests of which tool it chooses are skipped; all others are of the form.
"""

from __future__ import annotations

from typing import Any

import pytest

from conftest import MODEL

pytest.importorskip("langchain_tests", reason="langchain-tests is not installed")

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

WANTS_A_GOOD_MODEL = {
    "test_tool_calling",
    "test_tool_calling_async",
    "test_agent_loop",
    "test_unicode_tool_call_integration",
}
# Ollama's API has no tool_choice, so there every call is the model's own idea.
WANTS_TOOL_CHOICE = {"test_bind_runnables_as_tools", "test_tool_choice", "test_tool_calling_with_no_arguments"}


class OneServer(ChatModelIntegrationTests):
    """The common part of the three: the session's server, and the tests to skip that no model here can pass."""

    @pytest.fixture(autouse=True)
    def _know_the_server(self, url: str, request: pytest.FixtureRequest) -> None:
        type(self).url = url
        if request.node.originalname in WANTS_A_GOOD_MODEL | self.left_out:
            pytest.skip("the demo does not know what to call")

    url = ""
    left_out: frozenset[str] = frozenset()

    @property
    def has_structured_output(self) -> bool:
        return True


class TestOpenAI(OneServer):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": f"{self.url}/v1", "api_key": "x", "max_tokens": 200, "temperature": 0} | {
            "stream_usage": True
        }


class TestAnthropic(OneServer):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": self.url, "api_key": "x", "max_tokens": 200, "temperature": 0}


class TestOllama(OneServer):
    left_out = frozenset(WANTS_TOOL_CHOICE)

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOllama

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": self.url, "num_predict": 200, "temperature": 0}


del ChatModelIntegrationTests, OneServer
