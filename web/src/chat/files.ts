import { formatBytes } from "../lib/format";
import type { Attachment } from "./types";

const MOST_BYTES = 1024 ** 2;

/** The texts of files, and a sentence for each file that is none. */
export async function readFiles(files: Iterable<File>): Promise<{ read: Attachment[]; refused: string[] }> {
  const read: Attachment[] = [];
  const refused: string[] = [];
  for (const file of files) {
    const text = await readText(file);
    if (typeof text === "string") read.push({ name: file.name, text });
    else refused.push(text.reason);
  }
  return { read, refused };
}

async function readText(file: File): Promise<string | { reason: string }> {
  if (file.size > MOST_BYTES)
    return {
      reason: `“${file.name}” has ${formatBytes(file.size)}; a message takes files up to ${formatBytes(MOST_BYTES)}.`,
    };
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // Not UTF-8, or a folder.
  }
  return { reason: `“${file.name}” is no text file. A model here reads text only.` };
}

/** A conversation's title as the name of a file. */
export function fileName(title: string, ending: string): string {
  const plain = title
    .replace(/[^\p{L}\p{N} ._-]+/gu, "")
    .trim()
    .replace(/\s+/g, "-")
    .slice(0, 60);
  return `${plain || "conversation"}.${ending}`;
}
