/** A top-level part of a Markdown text. While a text grows, only its last block changes; the others stay as they are. */
export type Block =
  | { kind: "text"; text: string }
  | { kind: "code"; language: string; code: string; closed: boolean }
  | { kind: "math"; text: string; closed: boolean }
  | { kind: "details"; summary: string; text: string; closed: boolean };

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const LIST_ITEM = /^ {0,3}(?:[-*+]|\d{1,9}[.)])(?:\s|$)/;
const MOST_ITEMS = 15;
const DISPLAY = /^([ \t]*)\$\$(?!\$)([^$]*?\S[^$]*?)\$\$[ \t]*$/gm;
const DETAILS = /^ {0,3}<details(?: open)?>\s*(?:<summary>(.*)<\/summary>)?\s*$/i;
const SUMMARY = /^\s*<summary>(.*)<\/summary>\s*$/i;
const DETAILS_END = /^\s*<\/details>\s*$/i;
const MATH_OPENERS: Record<string, string> = { $$: "$$", "\\[": "\\]" };

/** Cut a Markdown text into blocks. Footnotes and named links tie blocks together, so a text with those stays in one. */
export function splitBlocks(text: string): Block[] {
  const splitter = new Splitter();
  for (const line of text.split("\n")) splitter.push(line);
  const blocks = splitter.end();
  const isTied = blocks.some((block) => block.kind === "text" && /^ {0,3}\[[^\]\n]+\]:/m.test(block.text));
  return isTied ? [{ kind: "text", text }] : blocks;
}

class Splitter {
  private readonly blocks: Block[] = [];
  private lines: string[] = [];
  /** What ends the code or maths that is open at the top level, or how deep the details are nested. */
  private open: { kind: "code" | "math" | "details"; closer: string; language: string; depth: number } | null = null;
  /** The fence of code that is open inside a list. */
  private inner: string | null = null;
  /** Items of the list after its first. */
  private items = 0;

  push(line: string): void {
    if (this.open) this.pushOpen(line, this.open);
    else if (this.isList() && this.belongsToList(line)) this.pushListLine(line);
    else this.pushTop(line);
  }

  end(): Block[] {
    if (this.open) this.close(false);
    else this.flush();
    return this.blocks;
  }

  private pushOpen(line: string, open: { kind: string; closer: string; language: string; depth: number }): void {
    if (open.kind === "details") {
      const summary = this.lines.length === 0 && !open.language ? SUMMARY.exec(line)?.[1] : undefined;
      if (DETAILS.test(line)) open.depth += 1;
      if (DETAILS_END.test(line)) open.depth -= 1;
      if (open.depth === 0) this.close(true);
      else if (summary !== undefined) open.language = summary;
      else this.lines.push(line);
      return;
    }
    const trimmed = line.trim();
    const closes =
      open.kind === "math"
        ? trimmed.endsWith(open.closer)
        : trimmed.startsWith(open.closer) && trimmed.replaceAll(open.closer[0] ?? "", "") === "";
    if (open.kind === "math" || !closes) this.lines.push(line);
    if (closes) this.close(true);
  }

  private pushTop(line: string): void {
    const fence = FENCE.exec(line);
    const math = openMath(line);
    const details = DETAILS.exec(line);
    if (fence?.[1]) {
      this.flush();
      const language = (fence[2] ?? "").trim().split(/[\s{:,]/)[0] ?? "";
      this.open = { kind: "code", closer: fence[1], language, depth: 1 };
    } else if (details) {
      this.flush();
      this.open = { kind: "details", closer: "", language: details[1] ?? "", depth: 1 };
    } else if (math) {
      this.flush();
      this.lines = [line];
      this.open = { kind: "math", closer: math, language: "", depth: 1 };
      if (line.trim().length > math.length && line.trim().endsWith(math)) this.close(true);
    } else if (line.trim() === "") {
      if (this.isList()) this.lines.push(line);
      else this.flush();
    } else {
      if (this.isList() && this.lines.at(-1)?.trim() === "") this.flush();
      if (this.lines.length > 0 && !this.isList() && LIST_ITEM.test(line) && !this.isQuote()) this.flush();
      this.lines.push(line);
    }
  }

  private pushListLine(line: string): void {
    // A long list is several blocks, so that a list of any length grows as fast as a short one.
    if (this.inner === null && LIST_ITEM.test(line)) {
      if (this.items === MOST_ITEMS) this.flush();
      else this.items += 1;
    }
    const fence = FENCE.exec(line.trim());
    if (this.inner === null && fence?.[1]) this.inner = fence[1];
    else if (this.inner !== null && line.trim().startsWith(this.inner)) this.inner = null;
    this.lines.push(line);
  }

  private belongsToList(line: string): boolean {
    if (this.inner !== null) return true;
    if (line.trim() === "") return false;
    return /^(?: {2,}|\t)/.test(line) || (LIST_ITEM.test(line) && listKind(line) === listKind(this.lines[0] ?? ""));
  }

  private isList(): boolean {
    return LIST_ITEM.test(this.lines[0] ?? "");
  }

  private isQuote(): boolean {
    return (this.lines[0] ?? "").trimStart().startsWith(">");
  }

  private close(closed: boolean): void {
    const open = this.open;
    const text = this.lines.join("\n");
    if (open?.kind === "code") this.blocks.push({ kind: "code", language: open.language, code: text, closed });
    else if (open?.kind === "details")
      this.blocks.push({ kind: "details", summary: plainText(open.language), text: text.trim(), closed });
    else this.blocks.push({ kind: "math", text, closed });
    this.lines = [];
    this.open = null;
  }

  private flush(): void {
    while (this.lines.at(-1)?.trim() === "") this.lines.pop();
    if (this.lines.length > 0) this.blocks.push({ kind: "text", text: this.lines.join("\n") });
    this.lines = [];
    this.items = 0;
    this.inner = null;
  }
}

/** The words of a summary, without the marks that models put into it. */
function plainText(summary: string): string {
  return summary.replace(/<\/?(?:b|strong|i|em|code)>|\*\*|`/gi, "").trim() || "Details";
}

function openMath(line: string): string | null {
  const trimmed = line.trim();
  for (const [opener, closer] of Object.entries(MATH_OPENERS)) {
    if (!trimmed.startsWith(opener)) continue;
    const inside = trimmed.slice(opener.length);
    const end = inside.indexOf(closer);
    if (end < 0 || end === inside.length - closer.length) return closer;
  }
  return null;
}

function listKind(line: string): string {
  return /^\s*\d/.test(line) ? "numbers" : (line.trim()[0] ?? "");
}

/** The last block of a growing text, so that what is half written neither shows as marks nor changes what stands. */
export function closeOpen(text: string): string {
  const lines = text.split("\n");
  if (lines.length <= 2 && lines.every((line, index) => isTableStart(line, index))) return "";
  let closed = text.replace(/\n {0,3}(?:=+|-+|[*+_#>|]+|\d{1,9}[.)]?)$/, "");
  closed = closed.replace(/!?\[([^\]\n]*)\]\([^)\n]*$/, "$1");
  const [outside, ticks] = withoutCode(closed);
  if (ticks) return closed.endsWith(ticks) ? closed.slice(0, -ticks.length) : closed + ticks;
  const stars = outside.match(/\*\*/g)?.length ?? 0;
  if (stars % 2 === 1)
    return /\*\*\s*$/.test(closed) ? closed.replace(/\*\*\s*$/, "") : closed.replace(/\*?\s*$/, "**");
  return closed.replace(/(^|[\s(])[*_]{1,3}$/, "$1");
}

function isTableStart(line: string, index: number): boolean {
  return index === 0
    ? /^\s*\|/.test(line)
    : !/^\s*\|?(?:\s*:?-+:?\s*\|)+\s*:?-*:?\s*\|?\s*$/.test(line) && /^[\s|:-]*$/.test(line);
}

/** A text without its code, and the backticks of code that is not closed ("" if there is none). */
function withoutCode(text: string): [string, string] {
  let rest = text;
  let outside = "";
  for (let match = /`+/.exec(rest); match; match = /`+/.exec(rest)) {
    const after = rest.slice(match.index + match[0].length);
    outside += rest.slice(0, match.index);
    const end = after.search(new RegExp(`(?<!\`)${match[0]}(?!\`)`));
    if (end < 0) return [outside, match[0]];
    rest = after.slice(end + match[0].length);
  }
  return [outside + rest, ""];
}

/** Whether a text may have maths in it. */
export function mayHaveMath(text: string): boolean {
  return /\\[([]|\$/.test(text);
}

/**
 * Maths in the one spelling that the parser is set to read, `$$…$$`: models also write `\(…\)`, `\[…\]` and `$…$`. A
 * single `$` counts only if no space stands inside it and no digit behind it, so that prices stay prices. What stands
 * alone between `$$` on a line, or on several, is a formula of its own, which is drawn large and in the middle.
 */
export function unifyMath(text: string): string {
  return text
    .split(/(`+[^`]*`+)/)
    .map((part, index, all) => (index % 2 === 1 ? part : unify(part, index === 0, index === all.length - 1)))
    .join("");
}

function unify(text: string, startsLine: boolean, endsLine: boolean): string {
  return text
    .replace(DISPLAY, (whole, indent: string, inside: string, offset: number) => {
      const isWhole = (offset > 0 || startsLine) && (offset + whole.length < text.length || endsLine);
      return isWhole ? `${indent}$$\n${indent}${inside.trim()}\n${indent}$$` : whole;
    })
    .replace(/\\\[([\s\S]+?)\\\]/g, (_, inside: string) => `\n$$\n${inside.trim()}\n$$\n`)
    .replace(/\\\(([^\n]+?)\\\)/g, (_, inside: string) => `$$${inside.trim()}$$`)
    .replace(/(?<![\\$\w])\$(?![\s$])([^$\n]{0,400}?[^\s$\\])\$(?![$\d])/g, (_, inside: string) => `$$${inside}$$`);
}
