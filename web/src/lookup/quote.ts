import type { Passage } from "./passages";

/** How a passage is named: its file, and the line where it begins. */
export function namePassage({ path, line }: Passage): string {
  return `${path}:${line}`;
}

/** A question behind the passages that it is answered from, each with its number. */
export function quotePassages(passages: readonly Passage[], question: string): string {
  if (passages.length === 0) return question;
  const quoted = passages.map((passage, index) => `[${index + 1}] ${namePassage(passage)}\n${passage.text}`);
  return [...quoted, `Answer from these passages and name their numbers, such as [1]: ${question}`].join("\n\n");
}
