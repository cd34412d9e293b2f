import type { Conversation } from "./types";

/** A line of the list: the heading of a group, or a conversation. */
export type Line = { kind: "heading"; title: string; count: number } | { kind: "row"; conversation: Conversation };

const DAY_MS = 86_400_000;

/** The conversations under headings: pinned ones, those of each folder, and the others by the day of their last use. */
export function groupConversations(
  all: readonly Conversation[],
  folded: ReadonlySet<string>,
  now: Date = new Date(),
): Line[] {
  const groups = new Map<string, Conversation[]>();
  const folders = all
    .flatMap((one) => (one.folder && !one.pinned ? [one.folder] : []))
    .sort((a, b) => a.localeCompare(b));
  for (const title of ["Pinned", ...folders, ...AGES.map(([age]) => age)]) groups.set(title, []);
  const midnight = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime();
  for (const one of all) {
    const days = Math.ceil((midnight - one.updated) / DAY_MS);
    const age = AGES.find(([, most]) => days <= most)?.[0] ?? "Older";
    groups.get(one.pinned ? "Pinned" : one.folder || age)?.push(one);
  }
  return [...groups].flatMap(([title, rows]) => {
    if (rows.length === 0) return [];
    const shown = folded.has(title) ? [] : rows.map((conversation): Line => ({ kind: "row", conversation }));
    return [{ kind: "heading", title, count: rows.length } as const, ...shown];
  });
}

/** Names of ages, and the most days before today that they reach back. */
const AGES: readonly (readonly [string, number])[] = [
  ["Today", 0],
  ["Yesterday", 1],
  ["Previous 7 days", 7],
  ["Previous 30 days", 30],
  ["Older", Number.POSITIVE_INFINITY],
];
