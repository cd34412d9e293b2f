import { ApiError, getJson } from "../api/client";
import { formatBytes } from "../lib/format";
import { decodeText } from "../lookup/gather";
import { isPicture, MOST_PICTURES, readPicture, writeUrl } from "./pictures";
import type { Attached, Attachment } from "./types";

/** Longer texts are looked up instead of put into a message. */
const MOST_BYTES = 1024 ** 2;
const MOST_PDF_BYTES = 32 * 1024 ** 2;
/** A scan goes with every turn of its conversation. */
const MOST_SCAN_BYTES = 8 * 1024 ** 2;

/** What the model of a conversation can be shown. */
export interface Sight {
  /** Why it takes no pictures, in words; null where it does. */
  blind: string | null;
  /** How many more pictures the conversation takes. */
  room: number;
}

/** The texts and pictures of files, and a sentence for each file that is none. */
export async function readFiles(files: Iterable<File>, sight: Sight): Promise<{ read: Attached; refused: string[] }> {
  const read: Attached = { files: [], pictures: [] };
  const refused: string[] = [];
  for (const file of files) {
    try {
      if (isPdf(file)) read.files.push(await readPdf(file, sight.blind === null));
      else if (!isPicture(file)) read.files.push({ name: file.name, text: await readText(file) });
      else if (sight.blind !== null) refused.push(sight.blind);
      else if (read.pictures.length < sight.room) read.pictures.push(await readPicture(file));
      else refused.push(`A conversation takes ${MOST_PICTURES} pictures. Remove one or start a new chat.`);
    } catch (error) {
      refused.push(error instanceof Error ? error.message : String(error));
    }
  }
  return { read, refused: [...new Set(refused)] };
}

/** Whether a file is a text, if it is one at all, that is too long for a message. */
export function isLongText(file: File): boolean {
  return file.size > MOST_BYTES && !isPdf(file) && !isPicture(file);
}

function isPdf(file: File): boolean {
  return file.type === "application/pdf" || /\.pdf$/i.test(file.name);
}

/** A PDF with its text, which the server reads. One without text is kept as it is for a model that sees its pages. */
export async function readPdf(file: File, sees: boolean): Promise<Attachment> {
  if (file.size > MOST_PDF_BYTES)
    throw new Error(
      `“${file.name}” has ${formatBytes(file.size)}; PDFs are read up to ${formatBytes(MOST_PDF_BYTES)}.`,
    );
  try {
    return { name: file.name, text: (await getJson<{ text: string }>("/v1/admin/pdf", { file })).text };
  } catch (error) {
    const isScan = error instanceof ApiError && error.message.includes("has no text");
    if (isScan && sees && file.size <= MOST_SCAN_BYTES)
      return { name: file.name, text: "", url: await writeUrl(new Blob([file], { type: "application/pdf" })) };
    if (isScan && sees)
      throw new Error(
        `“${file.name}” is a scan of ${formatBytes(file.size)}; scans are shown to a model up to ${formatBytes(MOST_SCAN_BYTES)}.`,
      );
    const reason = error instanceof Error ? error.message.replace(/^file: /, "") : String(error);
    throw new Error(`“${file.name}”: ${reason}`);
  }
}

async function readText(file: File): Promise<string> {
  const text = await file.arrayBuffer().then(decodeText, () => null); // a folder cannot be read
  if (text !== null) return text;
  throw new Error(`“${file.name}” is no text file, no PDF and no picture.`);
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
