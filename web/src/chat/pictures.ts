import { formatBytes } from "../lib/format";
import type { Picture } from "./types";

/** The server takes so many with one request, which tells the whole conversation. */
export const MOST_PICTURES = 16;

/** A model sees at most a few thousand squares of 32 pixels; what is larger would be shrunk by the server. */
const MOST_SIDE = 2_048;
/** Sixteen of them fit into a request's body, and a conversation into the browser's database. */
const MOST_BYTES = 1.4 * 1024 ** 2;
const MOST_FILE_BYTES = 64 * 1024 ** 2;
const QUALITIES = [0.9, 0.75, 0.5];
/** What the server reads as it is. */
const SENT_AS_IS = /^image\/(?:png|jpeg|webp|gif|bmp|avif)$/;

/** Whether a file is a picture; a drawing in SVG is text. */
export function isPicture(file: File): boolean {
  return file.type.startsWith("image/") && file.type !== "image/svg+xml";
}

/** The picture as it is sent: the file itself where it is small, else a smaller JPEG. Raises an Error in words. */
export async function readPicture(file: File): Promise<Picture> {
  const name = file.name || "picture";
  if (file.size > MOST_FILE_BYTES)
    throw new Error(`“${name}” has ${formatBytes(file.size)}; pictures have up to ${formatBytes(MOST_FILE_BYTES)}.`);
  let bitmap: ImageBitmap;
  try {
    bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
  } catch {
    throw new Error(`“${name}” is a picture that this browser cannot read. Save it as PNG or JPEG first.`);
  }
  try {
    const { width, height } = fitSize(bitmap.width, bitmap.height);
    const isSmall = width === bitmap.width && file.size <= MOST_BYTES;
    const sent = isSmall && SENT_AS_IS.test(file.type) ? file : await shrink(bitmap, width, height);
    return { name, url: await writeUrl(sent), width, height };
  } finally {
    bitmap.close();
  }
}

/** The size in which a picture is sent. */
export function fitSize(width: number, height: number): { width: number; height: number } {
  const factor = Math.min(1, MOST_SIDE / Math.max(width, height));
  return { width: Math.max(1, Math.round(width * factor)), height: Math.max(1, Math.round(height * factor)) };
}

/** The picture as it is seen, so its orientation is in the pixels; what is clear becomes white, as on the server. */
async function shrink(bitmap: ImageBitmap, width: number, height: number): Promise<Blob> {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  if (context === null) throw new Error("This browser has no memory left for the picture. Close other tabs.");
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  let smallest: Blob | null = null;
  for (const quality of QUALITIES) {
    smallest = await new Promise<Blob | null>((resolve) => canvas.toBlob(resolve, "image/jpeg", quality));
    if (smallest && smallest.size <= MOST_BYTES) break;
  }
  if (smallest === null) throw new Error("This browser has no memory left for the picture. Close other tabs.");
  return smallest;
}

/** A file as a data: address. */
export function writeUrl(blob: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** Whether an address holds the picture itself, so that nothing is fetched to show it. */
export function isPictureUrl(url: string): boolean {
  return /^data:image\/(?:png|jpeg|webp|gif|bmp|avif);base64,[A-Za-z0-9+/]+=*$/.test(url);
}

/** Whether an address holds a PDF itself. */
export function isPdfUrl(url: string): boolean {
  return /^data:application\/pdf;base64,[A-Za-z0-9+/]+=*$/.test(url);
}

/** How many pictures the messages of a path have. */
export function countPictures(path: readonly { role: string; pictures?: readonly Picture[] }[]): number {
  return path.reduce((sum, message) => sum + (message.pictures?.length ?? 0), 0);
}
