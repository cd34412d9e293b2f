"""Print an answer while it grows, stop it at a text, and look at the probabilities."""

from __future__ import annotations

from math import exp

from mlxr import LLM, Finish, SamplingParams, TextDelta

with LLM("demo") as llm:
    # A stop string ends the answer before it, wherever the tokens are cut; it is never shown, not even in part.
    params = SamplingParams(max_tokens=100, stop=("formatted",), logprobs=0)
    with llm.stream_chat([{"role": "user", "content": "Explain json.dumps."}], params) as stream:
        for event in stream:
            match event:
                case TextDelta(text=text, tokens=tokens):
                    certainty = min((exp(token.chosen.logprob) for token in tokens), default=1.0)
                    print(f"{certainty:5.0%}  {text!r}")
                case Finish(reason=reason, stop=stop):
                    print(f"ended by {reason}: {stop!r}")
