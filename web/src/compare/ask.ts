import { type ChatBody, streamChat } from "../api/chat";
import { describeError, isAbort } from "../api/client";

/** An answer while it grows and when it is there. */
export interface Asked {
  state: "waiting" | "growing" | "done" | "stopped" | "failed";
  text: string;
  reasoning: string;
  tokens: number;
  /** Seconds from the request to the first token, and of all. */
  firstS: number | null;
  wholeS: number;
  tokensPerS: number | null;
  cachedTokens: number;
  error: string | null;
}

export const NOTHING: Asked = {
  state: "waiting",
  text: "",
  reasoning: "",
  tokens: 0,
  firstS: null,
  wholeS: 0,
  tokensPerS: null,
  cachedTokens: 0,
  error: null,
};

/** Ask once; `show` gets the answer as it grows, and the last of it is returned. Never throws. */
export async function ask(body: ChatBody, signal: AbortSignal, show: (asked: Asked) => void): Promise<Asked> {
  const begun = performance.now();
  let asked: Asked = { ...NOTHING };
  const change = (part: Partial<Asked>) => {
    asked = { ...asked, ...part, wholeS: (performance.now() - begun) / 1000 };
    show(asked);
  };
  try {
    for await (const chunk of streamChat(body, signal)) {
      const delta = chunk.choices[0]?.delta;
      const text = delta?.content ?? "";
      const reasoning = delta?.reasoning_content ?? "";
      const firstS = asked.firstS ?? (text || reasoning ? (performance.now() - begun) / 1000 : null);
      change({
        state: firstS === null ? "waiting" : "growing",
        firstS,
        text: asked.text + text,
        reasoning: asked.reasoning + reasoning,
        tokens: chunk.usage?.completion_tokens ?? chunk.timings?.predicted_n ?? asked.tokens,
        tokensPerS: chunk.timings?.predicted_per_second ?? asked.tokensPerS,
        cachedTokens: chunk.timings?.cache_n ?? asked.cachedTokens,
      });
    }
    change({ state: "done" });
  } catch (error) {
    change(isAbort(error) ? { state: "stopped" } : { state: "failed", error: describeError(error) });
  }
  return asked;
}

/** Where two texts begin to differ, in characters; null where they are equal. */
export function findDifference(text: string, other: string): number | null {
  if (text === other) return null;
  let at = 0;
  while (at < text.length && text[at] === other[at]) at += 1;
  return at;
}
