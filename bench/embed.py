"""Measures texts and pairs per second: our encoders, llama.cpp, onnxruntime and sentence-transformers, in turns.

    python bench/embed.py --llama-python .venv-peers/bin/python --torch-python PYTHON            # the whole table
    python bench/embed.py --shape minilm-l6 --texts 32 --rounds 1 ...                             # a try
    python bench/embed.py --device cuda --torch-python PYTHON --vllm-python PYTHON      # a GPU: ours and these on it

Models have the shapes of all-MiniLM-L6-v2, bge-base-en-v1.5 and bge-reranker-base with random weights, and a made-up
vocabulary of BERT's size in which each word is a token, so all sides compute the same tokens. A side is a process that
stays loaded; it gets texts, tokenises them itself, and puts them into batches that suit it best: llama.cpp fills
batches of 512 or 2048 tokens, whichever is faster, onnxruntime and sentence-transformers take 32 texts of similar
length at a time. Texts have 20 to 400 tokens; pairs a query of 16 and a document of 20 to 400. Lengths are drawn once.
The interpreter of --llama-python needs llama_cpp; that of --torch-python torch, transformers and sentence_transformers,
and for onnxruntime onnx and onnxruntime; that of --vllm-python vllm. A side that cannot run is named and left out.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY, CONTEXT, BATCH_TEXTS = 30522, 512, 32
SHAPES = {"minilm-l6": (6, 384, 12, 1536), "bge-base": (12, 768, 12, 3072), "reranker-base": (12, 768, 12, 3072)}
SIDES = {  # name: its process, and the way that it computes
    "mlxr f32": ("ours", "f32"),
    "mlxr f16": ("ours", "f16"),
    "mlxr q8_0": ("ours", "q8_0"),
    "llama.cpp f16": ("llama", "f16"),
    "llama.cpp q8_0": ("llama", "q8_0"),
    "onnxruntime f32": ("onnx", "f32"),
    "onnxruntime int8": ("onnx", "int8"),
    "sentence-transformers f32": ("torch", "f32"),
    "sentence-transformers f16": ("torch", "f16"),  # only on a GPU, like the next
    "vllm f16": ("vllm", "f16"),
}
Texts = Sequence[str]
Compute = Callable[[Texts], object]


def make_words() -> list[str]:
    """As many words of letters as the vocabulary has room for."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(one) for one in itertools.islice(itertools.product(letters, repeat=4), VOCABULARY - len(SPECIAL))]


def write_folder(folder: Path, shape: str) -> None:
    """Write a Hugging Face folder with random weights."""
    tokenizers, save = importlib.import_module("tokenizers"), importlib.import_module("safetensors.numpy").save_file
    layers, hidden, heads, ffn = SHAPES[shape]
    ranks = shape.startswith("reranker")
    folder.mkdir(parents=True)
    vocabulary = {text: index for index, text in enumerate([*SPECIAL, *make_words()])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    words = roles | {"mask_token": "[MASK]", "tokenizer_class": "BertTokenizerFast", "model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification" if ranks else "BertModel"],
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "max_position_embeddings": CONTEXT,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if ranks else {}
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.RandomState(0)
    weights = {}
    for name, size in list_tensors(layers, hidden, ffn, ranks).items():
        drawn = random.standard_normal(size).astype(np.float32)
        norm = "LayerNorm" in name
        weights[name] = (
            drawn / np.float32(np.sqrt(size[-1]))
            if len(size) == 2
            else drawn / 50 + np.float32(norm and name.endswith("weight"))
        )
    save(weights, str(folder / "model.safetensors"), {"format": "pt"})
    if not ranks:
        (folder / "1_Pooling").mkdir()
        pooling = {"pooling_mode_mean_tokens": True, "word_embedding_dimension": hidden}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        kinds = (("Transformer", ""), ("Pooling", "1_Pooling"))
        modules = [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (kind, path) in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))


def list_tensors(layers: int, hidden: int, ffn: int, ranks: bool) -> dict[str, tuple[int, ...]]:
    """The names and shapes of BERT's tensors."""
    prefix, found = "bert." if ranks else "", dict[str, tuple[int, ...]]()

    def product(name: str, rows: int, columns: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (rows, columns), (rows,)

    for name, rows in (("word", VOCABULARY), ("position", CONTEXT), ("token_type", 2)):
        found[f"{prefix}embeddings.{name}_embeddings.weight"] = (rows, hidden)
    norms = [f"{prefix}embeddings.LayerNorm"]
    for index in range(layers):
        layer = f"{prefix}encoder.layer.{index}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            product(f"{layer}.attention.{part}", hidden, hidden)
        product(f"{layer}.intermediate.dense", ffn, hidden)
        product(f"{layer}.output.dense", hidden, ffn)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name in norms:
        found[f"{name}.weight"] = found[f"{name}.bias"] = (hidden,)
    product(f"{prefix}pooler.dense", hidden, hidden)
    if ranks:
        product("classifier", 1, hidden)
    return found


# The sides, each in a process of its own: a function from texts to their results.


def open_ours(folder: Path, way: str, threads: int, ranks: bool, device: Any) -> Compute:
    """Our engine, with a file that `mlxr convert` made."""
    from mlxr import LLM

    llm = LLM(folder / f"{way}.gguf", threads=threads if device == "cpu" else None, device=device)
    return (lambda texts: llm.rerank(texts[0], texts[1:])) if ranks else llm.embed


def open_llama(folder: Path, way: str, threads: int, ranks: bool, _: str) -> Compute:
    """llama.cpp with batches of 512 or of 2048 tokens, whichever were faster on the first texts."""
    import llama_cpp

    def make(batch: int) -> Any:
        pooling = llama_cpp.LLAMA_POOLING_TYPE_RANK if ranks else llama_cpp.LLAMA_POOLING_TYPE_MEAN
        sizes = {"n_ctx": batch, "n_batch": batch, "n_ubatch": batch, "n_threads": threads, "n_threads_batch": threads}
        return llama_cpp.Llama(
            str(folder / f"{way}.gguf"), embedding=True, pooling_type=pooling, verbose=False, **sizes
        )

    models, chosen = [make(512), make(2048)], list[Any]()

    def compute(texts: Texts) -> object:
        given = [f"{texts[0]} {text}" for text in texts[1:]] if ranks else list(texts)
        if not chosen:
            took = []
            for model in models:
                start = time.perf_counter()
                model.embed(given[:BATCH_TEXTS])
                took.append(time.perf_counter() - start)
            chosen.append(models[took.index(min(took))])
        return chosen[0].embed(given)

    return compute


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[start : start + BATCH_TEXTS] for start in range(0, len(order), BATCH_TEXTS)]


def open_onnx(folder: Path, way: str, threads: int, ranks: bool, _: str) -> Compute:
    """onnxruntime with the graph that torch exports, in float32, or with weights and activations of 8 bits."""
    runtime = importlib.import_module("onnxruntime")
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain, path = folder / "f32.onnx", folder / f"{way}.onnx"
    if not plain.exists():
        export_onnx(folder, plain, ranks)
    if not path.exists():
        quantization = importlib.import_module("onnxruntime.quantization")
        quantization.quantize_dynamic(plain, path, weight_type=quantization.QuantType.QInt8)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # spinning would disturb the next side
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def compute(texts: Texts) -> object:
        pairs = [(texts[0], text) for text in texts[1:]] if ranks else list(texts)
        encoded, made = tokenizer.encode_batch(pairs), []
        for batch in _batches([len(one.ids) for one in encoded]):
            longest = len(encoded[batch[0]].ids)
            arrays = [np.zeros((len(batch), longest), np.int64) for _ in range(3)]
            for row, index in enumerate(batch):
                one = encoded[index]
                for array, values in zip(arrays, (one.ids, one.attention_mask, one.type_ids), strict=True):
                    array[row, : len(values)] = values
            [states] = session.run(
                None, dict(zip(("input_ids", "attention_mask", "token_type_ids"), arrays, strict=True))
            )
            mask = arrays[1][:, :, None]
            made.append(states if ranks else (states * mask).sum(axis=1) / mask.sum(axis=1))
        return made

    return compute


def export_onnx(folder: Path, path: Path, ranks: bool) -> None:
    """Write the graph of the model with free sizes of batch and text."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    kind = "AutoModelForSequenceClassification" if ranks else "AutoModel"
    model = getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager").eval()

    class First(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            return self.model(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)[0]

    given = tuple(torch.ones((2, 16), dtype=torch.int64) for _ in range(3))
    names = ["input_ids", "attention_mask", "token_type_ids"]
    free = {name: {0: "texts", 1: "tokens"} for name in names}
    with torch.no_grad():
        torch.onnx.export(
            First(), given, str(path), input_names=names, output_names=["made"], dynamic_axes=free, dynamo=False
        )


def open_torch(folder: Path, way: str, threads: int, ranks: bool, device: str) -> Compute:
    """sentence-transformers, which sorts texts by length itself."""
    library, torch = importlib.import_module("sentence_transformers"), importlib.import_module("torch")
    torch.set_num_threads(threads)
    given = {"device": device, "model_kwargs": {"dtype": torch.float16 if way == "f16" else torch.float32}}
    if ranks:
        scorer = library.CrossEncoder(str(folder), **given)
        return lambda texts: scorer.predict([(texts[0], text) for text in texts[1:]], batch_size=BATCH_TEXTS)
    model = library.SentenceTransformer(str(folder), **given)
    return lambda texts: model.encode(list(texts), batch_size=BATCH_TEXTS, show_progress_bar=False)


def open_vllm(folder: Path, way: str, threads: int, ranks: bool, device: str) -> Compute:  # noqa: ARG001 -- as all
    """vLLM's pooling models, with its graphs and batches of its own choice."""
    library = importlib.import_module("vllm")
    model = library.LLM(
        str(folder), runner="pooling", dtype="float16", gpu_memory_utilization=0.3, max_model_len=CONTEXT
    )
    if ranks:
        return lambda texts: model.score(texts[0], list(texts[1:]), use_tqdm=False)
    return lambda texts: model.embed(list(texts), use_tqdm=False)


OPEN = {"vllm": open_vllm, "ours": open_ours, "llama": open_llama, "onnx": open_onnx, "torch": open_torch}


def serve(kind: str, way: str, folder: Path, threads: int, device: str) -> None:
    """Answer each line, a JSON list of texts, with the seconds that they took."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries goes to stderr
    try:
        compute = OPEN[kind](folder, way, threads, folder.name.startswith("reranker"), device)
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            texts = json.loads(line)
            start = time.perf_counter()
            compute(texts)
            print(json.dumps(time.perf_counter() - start), file=answers, flush=True)
    except Exception as error:  # other libraries may raise anything
        print(json.dumps(f"{type(error).__name__}: {error}"[:300]), file=answers, flush=True)


class Side:
    """A process that computes."""

    def __init__(self, python: str, name: str, folder: Path, threads: int, device: str) -> None:
        kind, way = SIDES[name]
        own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        if kind != "ours":  # it sets the variable itself; with a GPU the others tokenise on all processors, as is usual
            own["TOKENIZERS_PARALLELISM"] = "false" if device == "cpu" else "true"
        command = [python, __file__, "--serve", kind, way, str(folder), str(threads), device]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | own,
        )
        self.failure = None if (said := self._read()) == "ready" else said

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else "it ended"

    def run(self, texts: Texts) -> float:
        """The seconds for these texts; raises ValueError if they fail."""
        assert self._process.stdin is not None
        print(json.dumps(list(texts)), file=self._process.stdin, flush=True)
        taken = self._read()
        if not isinstance(taken, float):
            raise ValueError(str(taken))
        return taken

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


def draw_texts(shape: str, count: int) -> tuple[list[str], int]:
    """Texts of 20 to 400 tokens, with the two around each, and their tokens in all; a query first for pairs."""
    random, words = np.random.RandomState(1), np.array(make_words())
    lengths = random.randint(18, 399, count)
    texts = [" ".join(random.choice(words, length)) for length in lengths]
    if not shape.startswith("reranker"):
        return texts, int(lengths.sum()) + 2 * count
    return [" ".join(random.choice(words, 16)), *texts], int(lengths.sum()) + 19 * count


def prepare(folder: Path, shape: str, python: str) -> None:
    """Make the model's folder and files if they are missing."""
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        write_folder(part, shape)
        part.rename(folder)
    for way in ("f32", "f16", "q8_0"):
        if not (folder / f"{way}.gguf").exists():
            subprocess.run(
                [python, "-m", "mlxr", "convert", str(folder), str(folder / f"{way}.gguf"), "--type", way], check=True
            )


def measure(given: argparse.Namespace, shape: str) -> dict[str, Any]:
    """Measure one shape; the sides take turns."""
    pythons = {
        "ours": sys.executable,
        "llama": given.llama_python,
        "onnx": given.torch_python,
        "torch": given.torch_python,
        "vllm": given.vllm_python,
    }
    folder = given.models / shape
    prepare(folder, shape, sys.executable)
    count = given.pairs if shape.startswith("reranker") else given.texts
    texts, tokens = draw_texts(shape, count)
    sides, taken = dict[str, Side](), dict[str, list[float]]()
    try:
        for name, (kind, _) in SIDES.items():
            if pythons[kind] is None or (given.only and not any(part in name for part in given.only)):
                continue
            if (
                kind in ("llama", "onnx")
                if given.device != "cpu"
                else name in ("sentence-transformers f16", "vllm f16")
            ):
                continue
            side = Side(pythons[kind], name, folder, given.threads, given.device)
            if side.failure is not None:
                print(f"{name}: {side.failure}", file=sys.stderr)
                continue
            try:
                side.run(texts if given.device != "cpu" else texts[: BATCH_TEXTS + 1])  # untimed
            except ValueError as error:
                print(f"{name}: {error}", file=sys.stderr)
                side.close()
                continue
            sides[name], taken[name] = side, []
        for _ in range(given.rounds):
            for name, side in sides.items():
                taken[name].append(side.run(texts))
    finally:
        for side in sides.values():
            side.close()
    rates = {name: count / statistics.median(seconds) for name, seconds in taken.items()}
    return {"shape": shape, "count": count, "tokens": tokens, "rates": rates, "seconds": taken}


RATIOS = (  # our side, another side, and the ratio wanted
    ("mlxr f16", "llama.cpp f16", 2.0),
    ("mlxr q8_0", "llama.cpp q8_0", 2.0),
    ("mlxr f32", "onnxruntime f32", 1.5),
    ("mlxr q8_0", "onnxruntime int8", 1.5),
    ("mlxr f32", "sentence-transformers f32", 3.0),
    ("mlxr q8_0", "sentence-transformers f32", 3.0),
)


def show(result: dict[str, Any]) -> None:
    """Print a table of one shape."""
    rates = result["rates"]
    print(f"\n{result['shape']}: {result['count']} texts or pairs, {result['tokens']} tokens")
    for name, rate in rates.items():
        print(f"  {name:27} {rate:9.1f} a second {rate * result['tokens'] / result['count']:10.0f} tokens a second")
    for ours, other, wanted in RATIOS:
        if ours in rates and other in rates:
            print(f"  {ours} / {other}: {rates[ours] / rates[other]:.2f} (wanted {wanted})")


def main() -> None:
    """Measure the shapes that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", help="sides whose names have one of these parts")
    parser.add_argument("--llama-python")
    parser.add_argument("--torch-python")
    parser.add_argument("--vllm-python")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "bench-models")
    parser.add_argument("--json", type=Path, help="write all that was measured there")
    given = parser.parse_args()
    results = []
    for shape in given.shape:
        results.append(measure(given, shape))
        show(results[-1])
        if given.json is not None:
            given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    else:
        main()
