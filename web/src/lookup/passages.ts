/** A part of a file, from that line on, counted from 1. */
export interface Passage {
  path: string;
  line: number;
  text: string;
}

/** As many as `mlxr find` takes. */
export const PASSAGE_CHARACTERS = 800;

type Piece = readonly [line: number, text: string];

/**
 * The passages of a file, cut as `mlxr find` cuts. Paragraphs stay together as far as they fit. A heading of Markdown
 * begins a passage; a paragraph that is too long is cut after a sentence, else after a word.
 */
export function cutPassages(path: string, text: string, characters = PASSAGE_CHARACTERS): Passage[] {
  return [...splitText(text.replaceAll("\r\n", "\n"), characters)].map(([line, part]) => ({ path, line, text: part }));
}

function* splitText(text: string, characters: number): Generator<Piece> {
  let line = 1;
  let held = "";
  let heldLine = 1;
  for (const paragraph of text.split(/(\n[ \t]*\n\s*|\n(?=#{1,6} ))/)) {
    const plain = paragraph.trim();
    if (plain) {
      const start = line + countLines(paragraph.slice(0, paragraph.length - paragraph.trimStart().length));
      if (held && (held.length + plain.length + 2 > characters || plain.startsWith("#"))) {
        yield [heldLine, held];
        held = "";
      }
      for (const [offset, piece] of cutParagraph(plain, characters)) {
        if (held && held.length + piece.length + 2 > characters) {
          yield [heldLine, held];
          held = "";
        }
        if (!held) heldLine = start + offset;
        held = held ? `${held}\n\n${piece}` : piece;
      }
    }
    line += countLines(paragraph);
  }
  if (held) yield [heldLine, held];
}

/** The pieces of a paragraph, and the number of lines before each. */
function* cutParagraph(text: string, characters: number): Generator<Piece> {
  let line = 0;
  for (let at = 0; at < text.length; ) {
    let piece = text.slice(at, at + characters);
    if (at + characters < text.length) {
      const ends = [...piece.matchAll(/[.!?]\s|\n/g)].map((match) => match.index + match[0].length);
      const end = ends.at(-1) ?? piece.lastIndexOf(" ") + 1;
      if (end > Math.floor(characters / 3)) piece = piece.slice(0, end);
      else if (/[\ud800-\udbff]$/.test(piece)) piece = piece.slice(0, -1); // a character is not cut in two
    }
    if (piece.trim()) yield [line, piece.trim()];
    line += countLines(piece);
    at += piece.length;
  }
}

function countLines(text: string): number {
  let count = 0;
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) count++;
  return count;
}
