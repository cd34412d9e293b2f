import { getJson, send } from "./client";
import { readEvents } from "./sse";

/** A message as `/v1/chat/completions` reads it. */
export interface WireMessage {
  role: "system" | "user" | "assistant" | "tool";
  content: string | WirePart[];
  reasoning_content?: string;
  tool_calls?: WireCall[];
  tool_call_id?: string;
  name?: string;
}

export type WirePart =
  | { type: "text"; text: string }
  | { type: "image_url"; image_url: { url: string } }
  | { type: "file"; file: { filename: string; file_data: string } };

export interface WireCall {
  id: string;
  type: "function";
  function: { name: string; arguments: string };
}

/** The body of a request, without what makes it a stream. */
export interface ChatBody {
  model?: string;
  messages: WireMessage[];
  [field: string]: unknown;
}

export interface Alternative {
  token: string;
  logprob: number;
  bytes: number[] | null;
}

export interface TokenLogprob extends Alternative {
  top_logprobs: Alternative[];
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens: number };
}

/** Where the server's time went. `cache_n` tokens of the prompt came from the cache, `prompt_n` were computed. */
export interface Timings {
  cache_n: number;
  prompt_n: number;
  prompt_ms: number;
  predicted_n: number;
  predicted_ms: number;
  predicted_per_second: number | null;
  queue_ms: number;
}

export interface PromptProgress {
  total: number;
  cache: number;
  processed: number;
}

export interface CallDelta {
  index: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}

export interface Chunk {
  model?: string;
  choices: {
    index: number;
    delta: { content?: string | null; reasoning_content?: string | null; tool_calls?: CallDelta[] };
    logprobs?: { content: TokenLogprob[] | null } | null;
    finish_reason: "stop" | "length" | "tool_calls" | null;
  }[];
  usage?: Usage | null;
  timings?: Timings;
  prompt_progress?: PromptProgress;
  error?: { message?: string };
}

/** The server ended a stream with an error of its own, or without saying that it is complete. */
export class StreamError extends Error {
  override readonly name = "StreamError";
}

/** As `streamChat`, of a model that continues a text. */
export async function* streamText(body: Record<string, unknown>, signal: AbortSignal): AsyncGenerator<Chunk> {
  for await (const chunk of stream("/v1/completions", body, signal)) {
    const choices = (chunk.choices as unknown as { text: string; finish_reason: "stop" | "length" | null }[]).map(
      ({ text, finish_reason }) => ({ index: 0, delta: { content: text }, finish_reason }),
    );
    yield { ...chunk, choices };
  }
}

/** The chunks of an answer as they come. Leaving the loop, or the signal, ends the request on the server. */
export async function* streamChat(body: ChatBody, signal: AbortSignal): AsyncGenerator<Chunk> {
  yield* stream("/v1/chat/completions", body, signal);
}

async function* stream(path: string, body: object, signal: AbortSignal): AsyncGenerator<Chunk> {
  const response = await send(path, {
    body: {
      ...body,
      stream: true,
      stream_options: { include_usage: true },
      timings_per_token: true,
      return_progress: true,
    },
    signal,
  });
  for await (const { data } of readEvents(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data) as Chunk;
    if (chunk.error) throw new StreamError(chunk.error.message ?? "The server ended the answer with an error.");
    yield chunk;
  }
  throw new StreamError("The connection to the server broke before the answer was complete.");
}

/** How many tokens the model reads for this request. */
export async function countTokens(body: ChatBody, signal: AbortSignal): Promise<number> {
  const answer = await getJson<{ input_tokens: number }>("/v1/chat/completions/input_tokens", { body, signal });
  return answer.input_tokens;
}
