import type { Passage } from "./passages";

export const MOST_QUOTED = 6;
/** What passages may take of a context, and of what is left of it. */
const SHARE = 1 / 4;
const SHARE_OF_REST = 1 / 2;
/** Where the context is not known. */
const USUAL_CONTEXT = 4_096;
const RANK_WEIGHT = 60;

/** The cosine of each vector with that of a question. All have length 1. */
export function scoreVectors(vectors: readonly Float32Array[], question: Float32Array): Float32Array {
  return Float32Array.from(vectors, (vector) => {
    let sum = 0;
    for (let at = 0; at < question.length; at++) sum += (vector[at] ?? 0) * (question[at] ?? 0);
    return sum;
  });
}

/** The places of the best scores, the best first; of equal ones, the first. */
export function rank(scores: Float32Array, most: number, least = Number.NEGATIVE_INFINITY): number[] {
  return Array.from(scores.keys())
    .filter((at) => (scores[at] ?? 0) > least)
    .sort((a, b) => (scores[b] ?? 0) - (scores[a] ?? 0) || a - b)
    .slice(0, most);
}

/** One ranking of several that were made in different ways, whose scores cannot be compared: by the places in each. */
export function fuse<T>(rankings: readonly (readonly T[])[]): T[] {
  const points = new Map<T, number>();
  for (const ranking of rankings)
    for (const [place, one] of ranking.entries()) points.set(one, (points.get(one) ?? 0) + 1 / (RANK_WEIGHT + place));
  return [...points.keys()].sort((a, b) => (points.get(b) ?? 0) - (points.get(a) ?? 0));
}

/** How many tokens passages may take where so many of a context are used already; null where it is not known. */
export function boundTokens(context: number | null, used: number): number {
  const whole = context ?? USUAL_CONTEXT;
  return Math.max(0, Math.min(whole * SHARE, (whole - used) * SHARE_OF_REST));
}

/** About how many tokens a text has: three letters each, or one where an alphabet has no such tokens. */
export function estimateTokens(text: string): number {
  let plain = 0;
  for (const letter of text) if ((letter.codePointAt(0) ?? 0) < 0x250) plain++;
  return plain / 3 + [...text].length - plain;
}

/** The best passages that fit, at least one; the same text in two files counts once. */
export function takeBest(ranked: readonly Passage[], tokens: number): Passage[] {
  const taken: Passage[] = [];
  let used = 0;
  for (const passage of ranked) {
    const size = estimateTokens(passage.text) + estimateTokens(passage.path) + 4;
    if (taken.length > 0 && used + size > tokens) break;
    if (taken.some(({ text }) => text === passage.text)) continue;
    taken.push(passage);
    used += size;
    if (taken.length === MOST_QUOTED) break;
  }
  return taken;
}
