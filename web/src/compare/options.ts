import type { ChatBody } from "../api/chat";

/** What one side asks with; null leaves a number to the server. */
export interface Options {
  model: string;
  temperature: number | null;
  seed: number | null;
  maxTokens: number | null;
}

export const DEFAULTS: Options = { model: "", temperature: 0.8, seed: 1, maxTokens: 200 };

/** The request for one question. */
export function writeBody(prompt: string, options: Options): ChatBody {
  const body: ChatBody = { messages: [{ role: "user", content: prompt }] };
  if (options.model) body.model = options.model;
  if (options.temperature !== null) body.temperature = options.temperature;
  if (options.seed !== null) body.seed = options.seed;
  if (options.maxTokens !== null) body.max_tokens = options.maxTokens;
  return body;
}
