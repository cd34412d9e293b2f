import { describe, expect, it } from "vitest";
import { makeRandom } from "../lib/random";
import {
  appendMessage,
  EMPTY_TREE,
  listPath,
  listSiblings,
  makeTree,
  putMessage,
  removeBranch,
  showBranch,
  type Tree,
  takeMessage,
} from "./tree";
import type { Message } from "./types";

function user(id: string, parent: string | null, created = 0): Message {
  return { id, parent, created, conversation: "c", content: id, role: "user" };
}

function grow(...rows: [id: string, parent: string | null][]): Tree {
  return rows.reduce((tree, [id, parent], index) => appendMessage(tree, user(id, parent, index)), EMPTY_TREE);
}

function ids(tree: Tree): string[] {
  return listPath(tree).map((message) => message.id);
}

describe("branches", () => {
  const tree = grow(["q", null], ["a1", "q"], ["q2", "a1"], ["b", "q2"], ["a2", "q"]);

  it("shows the newest branch and numbers the versions", () => {
    expect(ids(tree)).toEqual(["q", "a2"]);
    expect(listSiblings(tree, "a2")).toEqual({ ids: ["a1", "a2"], index: 1 });
    expect(listSiblings(tree, "q")).toEqual({ ids: ["q"], index: 0 });
  });

  it("goes back to a version with all that came behind it", () => {
    expect(ids(showBranch(tree, "a1"))).toEqual(["q", "a1", "q2", "b"]);
    expect(ids(showBranch(tree, "unknown"))).toEqual(["q", "a2"]);
  });

  it("removes a version with all behind it and shows the one before", () => {
    const { tree: left, removed } = removeBranch(showBranch(tree, "a1"), "a1");
    expect(removed.sort()).toEqual(["a1", "b", "q2"]);
    expect(ids(left)).toEqual(["q", "a2"]);
    expect(ids(removeBranch(left, "a2").tree)).toEqual(["q"]);
    expect(removeBranch(left, "q").tree.messages.size).toBe(0);
  });

  it("changes a message without moving what is shown", () => {
    const changed = putMessage(showBranch(tree, "a1"), { ...user("a2", "q", 4), content: "new" });
    expect(ids(changed)).toEqual(["q", "a1", "q2", "b"]);
    expect(changed.messages.get("a2")?.content).toBe("new");
    expect(tree.messages.get("a2")?.content).toBe("a2");
  });

  it("follows another tab only where it goes on from what is shown", () => {
    expect(ids(takeMessage(tree, user("next", "a2", 9)))).toEqual(["q", "a2", "next"]);
    expect(ids(takeMessage(tree, user("next", "b", 9)))).toEqual(["q", "a2"]);
  });
});

describe("stored messages", () => {
  it("makes beginnings of messages whose parent is missing or that stand in a circle", () => {
    const tree = makeTree([user("x", "gone", 1), user("a", "c", 2), user("b", "a", 3), user("c", "b", 4)], "nowhere");
    expect(tree.messages.size).toBe(4);
    for (const id of tree.messages.keys()) expect(listPath(tree, id).length).toBeLessThanOrEqual(4);
    expect(tree.leaf).not.toBeNull();
    expect(listPath(tree, "x").map(({ id }) => id)).toEqual(["x"]);
  });

  it("reads 2,000 messages in a row at once", () => {
    const messages = Array.from({ length: 2000 }, (_, n) => user(`m${n}`, n ? `m${n - 1}` : null, n));
    const started = performance.now();
    expect(listPath(makeTree(messages.reverse(), null))).toHaveLength(2000);
    expect(performance.now() - started).toBeLessThan(500);
  });
});

it("stays one tree through random steps", () => {
  for (let seed = 0; seed < 60; seed++) {
    const random = makeRandom(seed);
    let tree = EMPTY_TREE;
    const pick = () => [...tree.messages.keys()][Math.floor(random() * tree.messages.size)] ?? null;
    for (let step = 0; step < 120; step++) {
      const dice = random();
      const chosen = pick();
      if (dice < 0.55 || chosen === null) {
        tree = appendMessage(tree, user(`m${step}`, random() < 0.1 ? null : random() < 0.6 ? tree.leaf : chosen, step));
        expect(tree.leaf).toBe(`m${step}`);
      } else if (dice < 0.75) {
        tree = showBranch(tree, chosen);
        expect(isOnPath(tree, chosen, tree.leaf)).toBe(true);
      } else if (dice < 0.85) {
        const before = tree;
        const { tree: next, removed } = removeBranch(tree, chosen);
        tree = next;
        expect(tree.messages.size).toBe(before.messages.size - removed.length);
        for (const id of removed) expect(isOnPath(before, chosen, id)).toBe(true);
      } else tree = takeMessage(tree, user(`other${step}`, random() < 0.5 ? tree.leaf : chosen, step));
      check(tree, `seed ${seed}, step ${step}`);
    }
    expect(makeTree(shuffle([...tree.messages.values()], random), tree.leaf)).toEqual(tree);
  }
});

function isOnPath(tree: Tree, id: string, leaf: string | null): boolean {
  return listPath(tree, leaf).some((message) => message.id === id);
}

function check(tree: Tree, where: string): void {
  const listed = [...tree.children.values()].flat();
  expect(listed.toSorted(), where).toEqual([...tree.messages.keys()].toSorted());
  for (const [parent, children] of tree.children)
    for (const id of children) expect(tree.messages.get(id)?.parent ?? "", where).toBe(parent);
  expect(tree.leaf === null, where).toBe(tree.messages.size === 0);
  const path = listPath(tree);
  expect(path.at(-1)?.id ?? null, where).toBe(tree.leaf);
  path.forEach((message, index) => {
    expect(message.parent, where).toBe(index === 0 ? null : path[index - 1]?.id);
    expect(listSiblings(tree, message.id).ids, where).toContain(message.id);
  });
}

function shuffle<T>(list: T[], random: () => number): T[] {
  for (let index = list.length - 1; index > 0; index--) {
    const other = Math.floor(random() * (index + 1));
    [list[index], list[other]] = [list[other] as T, list[index] as T];
  }
  return list;
}
