import { describe, expect, it } from "vitest";
import type { Chunk, TokenLogprob } from "../api/chat";
import { makeRandom } from "../lib/random";
import { Growth, placeTokens } from "./growth";
import { branchAt, canBranch, cutTokens, formatProbability, shadeOf } from "./tokens";
import type { AssistantMessage } from "./types";

const EMPTY: AssistantMessage = {
  id: "a",
  conversation: "c",
  parent: "q",
  created: 0,
  content: "",
  role: "assistant",
  status: "growing",
  model: "",
};

type Delta = Chunk["choices"][0]["delta"];

function chunk(delta: Delta, rest: Partial<Chunk["choices"][0]> = {}, more: Partial<Chunk> = {}): Chunk {
  return { model: "demo", choices: [{ index: 0, delta, finish_reason: null, ...rest }], ...more };
}

function token(text: string, logprob = -0.1): TokenLogprob {
  return { token: text, logprob, bytes: [...new TextEncoder().encode(text)], top_logprobs: [] };
}

describe("an answer that grows", () => {
  it("adds up text, thought with its time, calls and figures", () => {
    let now = 1000;
    const growth = new Growth(EMPTY, () => now);
    now += 50;
    growth.push(chunk({}, {}, { prompt_progress: { total: 40, cache: 32, processed: 32 } }));
    expect(growth.progress).toEqual({ total: 40, processed: 32 });
    now += 50;
    growth.push(chunk({ reasoning_content: "Let me " }));
    expect(growth.isThinking).toBe(true);
    now += 900;
    growth.push(chunk({ reasoning_content: "see." }));
    now += 100;
    growth.push(chunk({ content: "It is" }));
    expect(growth.isThinking).toBe(false);
    growth.push(chunk({ content: " so." }));
    growth.push(chunk({ tool_calls: [{ index: 0, id: "call_1", function: { name: "look", arguments: '{"a"' } }] }));
    growth.push(chunk({ tool_calls: [{ index: 0, function: { arguments: ":1}" } }] }));
    growth.push(chunk({}, { finish_reason: "tool_calls" }));
    const timings = {
      cache_n: 32,
      prompt_n: 8,
      prompt_ms: 90,
      predicted_n: 7,
      predicted_ms: 350,
      predicted_per_second: 20,
      queue_ms: 1,
    };
    growth.push({
      choices: [],
      usage: { prompt_tokens: 40, completion_tokens: 7, prompt_tokens_details: { cached_tokens: 32 } },
      timings,
    });
    expect(growth.read("complete")).toEqual({
      ...EMPTY,
      model: "demo",
      status: "done",
      content: "It is so.",
      reasoning: "Let me see.",
      reasoningMs: 1000,
      calls: [{ id: "call_1", name: "look", arguments: '{"a":1}' }],
      stats: {
        firstTokenMs: 100,
        tokensPerSecond: 20,
        promptTokens: 40,
        cachedTokens: 32,
        answerTokens: 7,
        queueMs: 1,
      },
    });
  });

  it("says how it ended", () => {
    const growth = new Growth({ ...EMPTY, error: "before" });
    growth.push(chunk({ content: "x" }, { finish_reason: "length" }));
    expect(growth.read("complete").status).toBe("length");
    expect(growth.read("complete").error).toBeUndefined();
    expect(growth.read("interrupted", "lost")).toMatchObject({ status: "interrupted", error: "lost", content: "x" });
  });

  it("goes on behind the text that there is", () => {
    const growth = new Growth({ ...EMPTY, content: "one", reasoning: "hm", reasoningMs: 5 });
    growth.push(chunk({ content: " two" }, { logprobs: { content: [token(" two")] } }));
    const message = growth.read("complete");
    expect(message.content).toBe("one two");
    expect(message.tokens).toEqual([{ text: " two", logprob: -0.1, at: 3, top: [] }]);
    expect(cutTokens(message.content, message.tokens ?? []).map(({ text }) => text)).toEqual(["one", " two"]);
  });

  it("tells the time to the first token once", () => {
    let now = 0;
    const growth = new Growth(EMPTY, () => now);
    for (const at of [30, 60]) {
      now = at;
      growth.push(chunk({ content: "x" }, {}, { timings: { ...TIMINGS, predicted_n: at } }));
    }
    expect(growth.read("stopped").stats).toMatchObject({ firstTokenMs: 30, answerTokens: 60 });
  });
});

const TIMINGS = {
  cache_n: 0,
  prompt_n: 5,
  prompt_ms: 1,
  predicted_n: 1,
  predicted_ms: 1,
  predicted_per_second: 1,
  queue_ms: 0,
};

describe("tokens", () => {
  it("are placed where they begin, whatever characters they cut", () => {
    for (let seed = 0; seed < 200; seed++) {
      const random = makeRandom(seed);
      const letters = ["a", " ", "é", "汉", "😀", "\n"];
      const text = Array.from({ length: 12 }, () => letters[Math.floor(random() * letters.length)]).join("");
      const bytes = [...new TextEncoder().encode(text)];
      const pieces: { bytes: number[] }[] = [];
      for (let at = 0; at < bytes.length; ) {
        const size = 1 + Math.floor(random() * 4);
        pieces.push({ bytes: bytes.slice(at, at + size) });
        at += size;
      }
      let read: number[] = [];
      placeTokens(pieces, text, 10).forEach((at, index) => {
        const before = new TextDecoder().decode(Uint8Array.from(read));
        expect(at, `seed ${seed}, token ${index}`).toBe(text.startsWith(before) ? 10 + before.length : null);
        read = [...read, ...(pieces[index]?.bytes ?? [])];
      });
    }
  });

  it("are pieces that make up the content, also where text has no tokens", () => {
    const tokens = [
      { text: "b", logprob: -1, at: 1, top: [] },
      { text: "\ufffd", bytes: [0xe6], logprob: -1, at: 2, top: [] },
      { text: "\ufffd", bytes: [0xb1, 0x89], logprob: -1, at: null, top: [] },
      { text: "d", logprob: -1, at: 3, top: [] },
    ];
    const pieces = cutTokens("ab汉de", tokens);
    expect(pieces.map(({ text, index }) => [text, index])).toEqual([
      ["a", null],
      ["b", 0],
      ["汉", 1],
      ["d", 3],
      ["e", null],
    ]);
  });

  it("branch where another one is text", () => {
    const message: AssistantMessage = {
      ...EMPTY,
      content: "one two three",
      tokens: [
        { text: "one", logprob: 0, at: 0, top: [] },
        { text: " two", logprob: -1, at: 3, top: [{ text: " 2", logprob: -2 }] },
        { text: " three", logprob: 0, at: 7, top: [] },
      ],
    };
    const branch = branchAt(message, 1, { text: " 2", logprob: -2 });
    expect(branch?.content).toBe("one 2");
    expect(branch?.tokens.map(({ text, at }) => [text, at])).toEqual([
      ["one", 0],
      [" 2", 3],
    ]);
    expect(branchAt(message, 1, { text: "\ufffd", bytes: [0xe6], logprob: -2 })).toBeNull();
    expect(canBranch({ text: "", logprob: 0 })).toBe(false);
  });

  it("show their probability", () => {
    expect([1, 0.5, 0.0514, 0.0001].map(formatProbability)).toEqual(["100 %", "50 %", "5.1 %", "< 0.1 %"]);
    expect([0, -0.3, -1, -2, -4].map(shadeOf)).toEqual([0, 1, 2, 3, 4]);
  });
});
