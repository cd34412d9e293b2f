import { expect, it } from "vitest";
import { groupConversations } from "./groups";
import { type Conversation, DEFAULT_SETTINGS } from "./types";

const NOW = new Date(2026, 10, 28, 12);

function make(title: string, daysAgo: number, more: Partial<Conversation> = {}): Conversation {
  const updated = new Date(2026, 10, 28 - daysAgo, 9).getTime();
  return { id: title, title, named: false, created: 0, updated, settings: DEFAULT_SETTINGS, leaf: null, ...more };
}

function spell(all: Conversation[], folded: string[] = []): string[] {
  return groupConversations(all, new Set(folded), NOW).map((line) =>
    line.kind === "heading" ? `${line.title} (${line.count})` : line.conversation.title,
  );
}

it("groups by pin, folder and day, and leaves out what is empty", () => {
  const all = [
    make("a", 0),
    make("b", 1),
    make("c", 5),
    make("d", 400),
    make("e", 400, { pinned: true, folder: "Work" }),
    make("f", 2, { folder: "Work" }),
  ];
  expect(spell(all)).toEqual([
    ...["Pinned (1)", "e", "Work (1)", "f", "Today (1)", "a"],
    ...["Yesterday (1)", "b", "Previous 7 days (1)", "c", "Older (1)", "d"],
  ]);
});

it("hides what is in a folded group", () => {
  expect(spell([make("a", 0), make("b", 0, { folder: "Today's" })], ["Today's"])).toEqual([
    "Today's (1)",
    "Today (1)",
    "a",
  ]);
});
