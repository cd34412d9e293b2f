import type { Chunk, TokenLogprob } from "../api/chat";
import type { AssistantMessage, Candidate, Token, ToolCall } from "./types";

/** An answer while it grows: takes the stream's chunks and says what has come. Knows no network and no page. */
export class Growth {
  content: string;
  reasoning: string;
  readonly calls: ToolCall[];
  /** How much of the prompt has been read; null before the server says so. */
  progress: { total: number; processed: number } | null = null;
  private readonly tokens: Token[];
  private readonly hadTokens: boolean;
  private readonly stats = {
    firstTokenMs: null as number | null,
    tokensPerSecond: null as number | null,
    promptTokens: 0,
    cachedTokens: 0,
    answerTokens: 0,
    queueMs: 0,
  };
  private finish: "stop" | "length" | "tool_calls" | null = null;
  private model: string;
  private thinkingFrom: number | null = null;
  private thoughtMs: number;

  /** `now` tells milliseconds; `before` is the message as it stood when the request began. */
  constructor(
    private readonly before: AssistantMessage,
    private readonly now: () => number = () => performance.now(),
    private readonly sent: number = now(),
  ) {
    this.content = before.content;
    this.reasoning = before.reasoning ?? "";
    this.calls = [...(before.calls ?? [])];
    this.tokens = [...(before.tokens ?? [])];
    this.hadTokens = before.tokens !== undefined;
    this.model = before.model;
    this.thoughtMs = before.reasoningMs ?? 0;
  }

  get isThinking(): boolean {
    return this.thinkingFrom !== null;
  }

  get isEmpty(): boolean {
    return this.content === "" && this.reasoning === "" && this.calls.length === 0;
  }

  push(chunk: Chunk): void {
    if (chunk.model) this.model = chunk.model;
    this.count(chunk);
    const choice = chunk.choices[0];
    if (choice === undefined) return;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
    if (content || thought || calls?.length) this.stats.firstTokenMs ??= this.now() - this.sent;
    if (thought) {
      this.thinkingFrom ??= this.now();
      this.reasoning += thought;
    }
    if (content || calls?.length) this.endThought();
    if (choice.logprobs?.content) this.addTokens(choice.logprobs.content, content ?? "");
    if (content) this.content += content;
    for (const call of calls ?? []) this.addCall(call.index, call.id, call.function?.name, call.function?.arguments);
    if (choice.finish_reason) {
      this.finish = choice.finish_reason;
      this.endThought();
    }
  }

  /** The message as it stands now, with the status that it has, or had when it broke off. */
  read(status: "growing" | "stopped" | "interrupted" | "failed" | "complete", error?: string): AssistantMessage {
    const { error: _, ...before } = this.before;
    const spent = this.thoughtMs + (this.thinkingFrom === null ? 0 : this.now() - this.thinkingFrom);
    return {
      ...before,
      content: this.content,
      model: this.model,
      status: status === "complete" ? (this.finish === "length" ? "length" : "done") : status,
      ...(this.reasoning && { reasoning: this.reasoning, reasoningMs: Math.round(spent) }),
      ...(this.calls.length > 0 && { calls: this.calls.map((call) => ({ ...call })) }),
      ...((this.hadTokens || this.tokens.length > 0) && { tokens: [...this.tokens] }),
      ...(this.stats.promptTokens > 0 && { stats: { ...this.stats } }),
      ...(error !== undefined && { error }),
    };
  }

  private count({ usage, timings, prompt_progress: progress }: Chunk): void {
    if (progress) this.progress = { total: progress.total, processed: progress.processed };
    if (timings) {
      this.stats.promptTokens = timings.cache_n + timings.prompt_n;
      this.stats.cachedTokens = timings.cache_n;
      this.stats.answerTokens = timings.predicted_n;
      this.stats.tokensPerSecond = timings.predicted_n > 1 ? timings.predicted_per_second : null;
      this.stats.queueMs = timings.queue_ms;
    }
    if (!usage) return;
    this.stats.promptTokens = usage.prompt_tokens;
    this.stats.answerTokens = usage.completion_tokens;
    this.stats.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? this.stats.cachedTokens;
  }

  private endThought(): void {
    if (this.thinkingFrom === null) return;
    this.thoughtMs += this.now() - this.thinkingFrom;
    this.thinkingFrom = null;
  }

  private addCall(index: number, id = "", name = "", args = ""): void {
    const call = this.calls[index] ?? { id: "", name: "", arguments: "" };
    this.calls[index] = { id: call.id || id, name: call.name || name, arguments: call.arguments + args };
  }

  private addTokens(tokens: readonly TokenLogprob[], text: string): void {
    const starts = placeTokens(tokens, text, this.content.length);
    tokens.forEach((token, index) => {
      const top = token.top_logprobs.map(readCandidate);
      this.tokens.push({ ...readCandidate(token), at: starts[index] ?? null, top });
    });
  }
}

/** Where in the content each token of a piece of text begins; null inside a character, or where it cannot be told. */
export function placeTokens(
  tokens: readonly { bytes: number[] | null }[],
  text: string,
  from: number,
): (number | null)[] {
  const decoder = new TextDecoder();
  let read = "";
  let missing = 0;
  return tokens.map(({ bytes }) => {
    const start = missing === 0 && text.startsWith(read) ? from + read.length : null;
    read += decoder.decode(Uint8Array.from(bytes ?? []), { stream: true });
    for (const byte of bytes ?? []) missing = countMissing(byte, missing);
    return start;
  });
}

/** How many bytes a character of UTF-8 still lacks after this byte. */
function countMissing(byte: number, missing: number): number {
  if (byte < 0x80) return 0;
  if (byte < 0xc0) return Math.max(0, missing - 1);
  return byte >= 0xf0 ? 3 : byte >= 0xe0 ? 2 : 1;
}

function readCandidate({
  token,
  logprob,
  bytes,
}: {
  token: string;
  logprob: number;
  bytes: number[] | null;
}): Candidate {
  return token.includes("\ufffd") && bytes ? { text: token, logprob, bytes } : { text: token, logprob };
}
