"""Ask from several threads: their requests share the engine's batches, and each answer is the same as alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from mlxr import LLM, SamplingParams

names = ("os.path.join", "json.dumps", "time.sleep", "shutil.copy", "re.sub", "math.floor")

with LLM("demo") as llm:

    def ask(name: str) -> str:
        """The first sentence of a function's docstring."""
        question = [{"role": "user", "content": f"What does {name} do?"}]
        return llm.chat(question, SamplingParams(max_tokens=60, temperature=0)).text

    with ThreadPoolExecutor(len(names)) as pool:
        together = list(pool.map(ask, names))
    print("\n".join(together))
    print(f"equal: {together == [ask(name) for name in names]}")
