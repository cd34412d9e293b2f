import { formatBytes, formatCount } from "../lib/format";

/** A file of a folder that is attached; its path begins with the folder's name. */
export interface Found {
  path: string;
  file: File;
}

export interface Limits {
  files: number;
  /** Of all files together. */
  bytes: number;
  textBytes: number;
  pdfBytes: number;
}

export const LIMITS: Limits = {
  files: 2_000,
  bytes: 64 * 1024 ** 2,
  textBytes: 8 * 1024 ** 2,
  pdfBytes: 32 * 1024 ** 2,
};
export const MOST_PASSAGES = 20_000;

/** Folders that programs fill with what others wrote. */
const FOREIGN = new Set(["node_modules", "__pycache__", "bower_components"]);
/** Kinds that are known to be no text, so that their files are not even read. */
const BINARY = new Set(
  (
    "7z a apk avi avif bin bmp bz2 class dat db dll dmg doc docx dylib eot exe flac gguf gif gz heic ico iso jar jpeg " +
    "jpg lib lockb m4a mkv mov mp3 mp4 npy npz o odp ods odt ogg onnx otf parquet pdb pkl png ppt pptx psd pt pyc pyd " +
    "rar safetensors so sqlite tar tgz tif tiff ttf war wasm wav webm webp whl woff woff2 xls xlsx xz zip zst"
  ).split(" "),
);
const MOST_NAMED = 3;

/** Why files were left out: for each reason the paths. */
export type LeftOut = ReadonlyMap<string, readonly string[]>;

/** Whether a folder or file is one that nobody means when they attach the folder around it. */
export function isHidden(name: string): boolean {
  return name.startsWith(".") || FOREIGN.has(name);
}

export function isPdfPath(path: string): boolean {
  return /\.pdf$/i.test(path);
}

/** The files of a folder that are read, in the order of their paths, and why others are not. */
export function chooseFiles(found: readonly Found[], limits: Limits = LIMITS): { chosen: Found[]; left: LeftOut } {
  const left = new Map<string, string[]>();
  const chosen: Found[] = [];
  let bytes = 0;
  const sorted = [...found].sort((a, b) => (a.path < b.path ? -1 : a.path > b.path ? 1 : 0));
  for (const one of sorted) {
    const reason = refuse(one);
    if (reason) leaveOut(left, reason, one.path);
    else {
      chosen.push(one);
      bytes += one.file.size;
    }
  }
  return { chosen, left };

  function refuse({ path, file }: Found): string | null {
    const most = isPdfPath(path) ? limits.pdfBytes : limits.textBytes;
    const [, ...below] = path.split("/");
    if (below.some(isHidden)) return "hidden, or in a folder such as node_modules";
    if (BINARY.has(endingOf(path))) return "no text";
    if (file.size > most) return `larger than ${formatBytes(most)}`;
    if (chosen.length >= limits.files) return `beyond the ${formatCount(limits.files)} files that a folder may have`;
    if (bytes + file.size > limits.bytes) return `beyond the ${formatBytes(limits.bytes)} that a folder may have`;
    return null;
  }
}

/** Note that a file was left out, and why. */
export function leaveOut(left: Map<string, string[]>, reason: string, path: string): void {
  const paths = left.get(reason);
  if (paths) paths.push(path);
  else left.set(reason, [path]);
}

/** What was left out of a folder, a sentence for each reason. */
export function describeLeftOut(left: LeftOut): string[] {
  return [...left].map(([reason, paths]) => {
    const named = paths.slice(0, MOST_NAMED).map((path) => `“${path}”`);
    const more = paths.length > MOST_NAMED ? ` and ${formatCount(paths.length - MOST_NAMED)} more` : "";
    return `Left out: ${named.join(", ")}${more} (${reason}).`;
  });
}

/** The folder that the files of `<input webkitdirectory>` lie in, with their paths. */
export function readChosen(files: Iterable<File>): Found[] {
  return [...files].map((file) => ({ path: file.webkitRelativePath || file.name, file }));
}

/** The text of bytes, or null where they are none: not UTF-8, or with zeros. */
export function decodeText(bytes: ArrayBuffer): string | null {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

function endingOf(path: string): string {
  return /\.([^./]+)$/.exec(path)?.[1]?.toLowerCase() ?? "";
}
