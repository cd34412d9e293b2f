import type { AssistantMessage, Candidate, Token } from "./types";

/** A piece of an answer's text: a token, or text that came without probabilities (`token` is null then). */
export interface Piece {
  text: string;
  /** The token's place in the message's list. */
  index: number | null;
  token: Token | null;
}

/** The answer's text cut into its tokens. Together the pieces are the content, whatever the tokens say. */
export function cutTokens(content: string, tokens: readonly Token[]): Piece[] {
  const pieces: Piece[] = [];
  let at = 0;
  const starts = tokens.map((token) => token.at);
  tokens.forEach((token, index) => {
    if (token.at === null || token.at < at || token.at >= content.length) return;
    if (token.at > at) pieces.push({ text: content.slice(at, token.at), index: null, token: null });
    const next = starts.slice(index + 1, index + 9).find((start) => start !== null) ?? content.length;
    const end = Math.min(next, content.length, token.bytes ? next : token.at + token.text.length);
    pieces.push({ text: content.slice(token.at, end), index, token });
    at = end;
  });
  if (at < content.length) pieces.push({ text: content.slice(at), index: null, token: null });
  return pieces;
}

/** The beginning of an answer with another token in one place; null where that token is only a part of a character. */
export function branchAt(
  message: AssistantMessage,
  index: number,
  candidate: Candidate,
): { content: string; tokens: Token[] } | null {
  const token = message.tokens?.[index];
  if (!token || token.at === null || !canBranch(candidate)) return null;
  const before = message.tokens?.slice(0, index) ?? [];
  return {
    content: message.content.slice(0, token.at) + candidate.text,
    tokens: [...before, { ...candidate, at: token.at, top: token.top }],
  };
}

/** Whether a token is text of its own, so that an answer can go on behind it. An end token has no text. */
export function canBranch(candidate: Candidate): boolean {
  return candidate.bytes === undefined && candidate.text !== "";
}

export function probability(logprob: number): number {
  return Math.min(1, Math.exp(logprob));
}

/** A probability as people read it: "98 %", "0.3 %", "< 0.1 %". */
export function formatProbability(value: number): string {
  const percent = value * 100;
  if (percent < 0.1) return "< 0.1 %";
  return `${percent < 9.95 ? percent.toFixed(1) : Math.round(percent)} %`;
}

/** The shade of a token, 0 (certain) to 4 (a surprise). */
export function shadeOf(logprob: number): 0 | 1 | 2 | 3 | 4 {
  const value = probability(logprob);
  if (value >= 0.9) return 0;
  if (value >= 0.6) return 1;
  if (value >= 0.3) return 2;
  return value >= 0.1 ? 3 : 4;
}

/** A token's text with its white space made visible. */
export function spellToken(text: string): string {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(end)";
}
