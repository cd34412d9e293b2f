/** A stretch of two texts: in both, in the first alone ("gone"), or in the second alone ("new"). */
export interface Part {
  kind: "same" | "gone" | "new";
  text: string;
}

/** Texts that differ in more words than this are told to differ from their first to their last different word. */
const MOST_EDITS = 1_000;

/** What leads from one text to another, word by word: as few words as possible are gone or new (Myers, 1986). */
export function findParts(from: string, to: string): Part[] {
  const [a, b] = [splitWords(from), splitWords(to)];
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head += 1;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a.at(-1 - tail) === b.at(-1 - tail)) tail += 1;
  const middle = compare(a.slice(head, a.length - tail), b.slice(head, b.length - tail));
  return gather([
    { kind: "same", text: a.slice(0, head).join("") },
    ...middle,
    { kind: "same", text: a.slice(a.length - tail).join("") },
  ]);
}

/** How many words are gone or new; blanks and marks do not count. */
export function countChanges(parts: readonly Part[]): number {
  const words = (kind: Part["kind"]) =>
    parts.reduce((sum, part) => sum + (part.kind === kind ? (part.text.match(/[\p{L}\p{N}_]+/gu)?.length ?? 0) : 0), 0);
  return Math.max(words("gone"), words("new"));
}

function splitWords(text: string): string[] {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
}

/** The shortest way through the grid of both lists, found by ever more edits and then walked back. */
function compare(a: readonly string[], b: readonly string[]): Part[] {
  const reached: Int32Array[] = [];
  const size = Math.min(a.length + b.length, MOST_EDITS);
  const ends = new Int32Array(2 * size + 3);
  const middle = size + 1;
  for (let edits = 0; edits <= size; edits++) {
    reached.push(ends.slice());
    for (let line = -edits; line <= edits; line += 2) {
      let x = stepsDown(ends, middle + line, line, edits)
        ? read(ends, middle + line + 1)
        : read(ends, middle + line - 1) + 1;
      while (x < a.length && x - line < b.length && a[x] === b[x - line]) x += 1;
      ends[middle + line] = x;
      if (x >= a.length && x - line >= b.length) return walkBack(a, b, reached, middle);
    }
  }
  return [
    { kind: "gone", text: a.join("") },
    { kind: "new", text: b.join("") },
  ];
}

function walkBack(a: readonly string[], b: readonly string[], reached: readonly Int32Array[], middle: number): Part[] {
  const parts: Part[] = [];
  let [x, y] = [a.length, b.length];
  for (let edits = reached.length - 1; edits >= 0; edits--) {
    const ends = reached[edits] ?? new Int32Array();
    const line = x - y;
    const down = stepsDown(ends, middle + line, line, edits);
    const before = edits === 0 ? 0 : read(ends, middle + line + (down ? 1 : -1));
    const begin = edits === 0 || down ? before : before + 1;
    for (; x > begin; x--, y--) parts.push({ kind: "same", text: a[x - 1] ?? "" });
    if (edits === 0) break;
    if (down) parts.push({ kind: "new", text: b[--y] ?? "" });
    else parts.push({ kind: "gone", text: a[--x] ?? "" });
  }
  return parts.reverse();
}

/** Whether the furthest way with so many edits comes to this diagonal by a word of the second list. */
function stepsDown(ends: Int32Array, at: number, line: number, edits: number): boolean {
  return line === -edits || (line !== edits && read(ends, at - 1) < read(ends, at + 1));
}

function read(ends: Int32Array, at: number): number {
  return ends[at] ?? 0;
}

/** Neighbours of a kind as one, and a blank between two changes as part of them, so that sentences can be read. */
function gather(parts: readonly Part[]): Part[] {
  const found: Part[] = [];
  let [gone, added] = ["", ""];
  const end = () => {
    if (gone) found.push({ kind: "gone", text: gone });
    if (added) found.push({ kind: "new", text: added });
    [gone, added] = ["", ""];
  };
  parts.forEach(({ kind, text }, index) => {
    if (text === "") return;
    const next = parts.slice(index + 1).find((part) => part.text !== "");
    const isGap = kind === "same" && /^\s+$/.test(text) && (gone || added) && next && next.kind !== "same";
    if (kind === "gone" || isGap) gone += text;
    if (kind === "new" || isGap) added += text;
    if (kind !== "same" || isGap) return;
    end();
    const last = found.at(-1);
    if (last?.kind === "same") last.text += text;
    else found.push({ kind, text });
  });
  end();
  return found;
}
