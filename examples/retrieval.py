"""Answer from documents: find the passage that is nearest to the question, and put it before the question."""

from __future__ import annotations

from operator import mul

from mlxr import LLM, SamplingParams

passages = ["The library opens at nine.", "os.path.join joins the parts of a path.", "Bread is sold on Mondays."]
question = "What does os.path.join do?"

with LLM("demo") as llm:  # an embedding model finds more; this one shows the calls
    *vectors, asked = llm.embed([*passages, question])
    nearness = [sum(map(mul, vector, asked)) for vector in vectors]
    for score, passage in sorted(zip(nearness, passages, strict=True), reverse=True):
        print(f"{score:.3f}  {passage}")
    found = passages[nearness.index(max(nearness))]
    message = {"role": "user", "content": f"{found}\n\n{question}"}
    print(llm.chat([message], SamplingParams(max_tokens=60, temperature=0)).text)
