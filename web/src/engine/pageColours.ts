import { holderOf, ON_DISK, storeOf, WAITING } from "./liveState";

/** The kinds of a page, in the order of the legend: name, colour's name in tokens.css. */
export const KINDS = [
  ["free", "Free", "--page-free"],
  ["private", "Private", "--page-private"],
  ["shared", "Shared", "--page-shared"],
  ["cached", "Cached", "--page-cached"],
  ["disk", "On disk", "--page-disk"],
  ["waiting", "Waiting to be written", "--page-waiting"],
] as const;

export interface Palette {
  holders: readonly string[];
  disk: string;
  waiting: string;
  evicted: string;
  copied: string;
  ink: string;
}

/** The colours of the theme that is on now. */
export function readPalette(element: Element): Palette {
  const style = getComputedStyle(element);
  const read = (name: string) => style.getPropertyValue(name).trim();
  return {
    holders: ["--page-free", "--page-private", "--page-shared", "--page-cached"].map(read),
    disk: read("--page-disk"),
    waiting: read("--page-waiting"),
    evicted: read("--danger"),
    copied: read("--warning"),
    ink: read("--text"),
  };
}

/** Draw one page: its holder fills the cell, a foot tells that it is on disk or waits for it. */
export function drawPage(
  context: CanvasRenderingContext2D,
  palette: Palette,
  code: number,
  x: number,
  y: number,
  width: number,
  height: number,
): void {
  context.fillStyle = palette.holders[holderOf(code)] ?? "";
  context.fillRect(x, y, width, height);
  const store = storeOf(code);
  if (store === 0) return;
  const foot = Math.max(1, Math.round(height * 0.3));
  context.fillStyle = store === WAITING ? palette.waiting : palette.disk;
  context.fillRect(x, y + height - foot, width, foot);
}

/** Draw several pages in one square: how many of them are free, cached, shared and private, from above. */
export function drawPages(
  context: CanvasRenderingContext2D,
  palette: Palette,
  codes: ArrayLike<number>,
  x: number,
  y: number,
  side: number,
): void {
  const counts = [0, 0, 0, 0];
  for (let at = 0; at < codes.length; at++) {
    const holder = holderOf(codes[at] ?? 0);
    counts[holder] = (counts[holder] ?? 0) + 1;
  }
  let from = 0;
  for (const holder of FROM_ABOVE) {
    const part = ((counts[holder] ?? 0) * side) / codes.length;
    context.fillStyle = palette.holders[holder] ?? "";
    context.fillRect(x, y + from, side, part);
    from += part;
  }
}

const FROM_ABOVE = [0, 3, 2, 1];

/** What a page is, in words. */
export function describePage(code: number): string {
  const holder = [
    "free",
    "private: one answer holds it",
    "shared: several answers hold it",
    "cached: it can be found again",
  ];
  const store = storeOf(code) === ON_DISK ? ", on disk" : storeOf(code) === WAITING ? ", waiting to be written" : "";
  return `${holder[holderOf(code)]}${store}`;
}
