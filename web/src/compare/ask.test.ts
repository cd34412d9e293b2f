import { expect, it, vi } from "vitest";
import { type Asked, ask, findDifference } from "./ask";

function stream(...chunks: (object | string)[]): void {
  const text = chunks.map((chunk) => `data: ${typeof chunk === "string" ? chunk : JSON.stringify(chunk)}\n\n`).join("");
  vi.stubGlobal(
    "fetch",
    vi.fn(async () => new Response(text)),
  );
}

const say = (content: string) => ({ choices: [{ index: 0, delta: { content }, finish_reason: null }] });

it("gathers text, counts and times", async () => {
  const timings = { cache_n: 3, prompt_n: 2, prompt_ms: 1, predicted_n: 2, predicted_ms: 4, predicted_per_second: 500 };
  stream(say("Hel"), say("lo"), { choices: [], usage: { prompt_tokens: 5, completion_tokens: 2 }, timings }, "[DONE]");
  const seen: Asked[] = [];
  const asked = await ask({ messages: [] }, new AbortController().signal, (one) => seen.push(one));
  expect(asked).toMatchObject({
    state: "done",
    text: "Hello",
    tokens: 2,
    tokensPerS: 500,
    cachedTokens: 3,
    error: null,
  });
  expect(seen.map((one) => one.state)).toEqual(["growing", "growing", "growing", "done"]);
});

it("says why an answer failed, and keeps what came", async () => {
  stream(say("Hel"), { error: { message: "the engine is being stopped" }, choices: [] });
  const asked = await ask({ messages: [] }, new AbortController().signal, () => undefined);
  expect(asked).toMatchObject({ state: "failed", text: "Hel", error: "the engine is being stopped" });
});

it("finds the first difference", () => {
  expect(findDifference("abc", "abc")).toBeNull();
  expect(findDifference("abc", "abd")).toBe(2);
  expect(findDifference("abc", "ab")).toBe(2);
  expect(findDifference("", "x")).toBe(0);
});
