import "fake-indexeddb/auto";
import { beforeEach, describe, expect, it, vi } from "vitest";
import type { Message } from "./types";

/** A tab: its own copy of the modules over the shared database. */
async function openTab() {
  vi.resetModules();
  const library = await import("./library");
  await library.openLibrary();
  return library;
}

function user(conversation: string, id: string, parent: string | null, content = id): Message {
  return { id, conversation, parent, created: Date.now(), content, role: "user" };
}

beforeEach(() => {
  indexedDB.deleteDatabase("mlxr");
  localStorage.clear();
});

describe("the library", () => {
  it("keeps a conversation from its first message on, titled by it", async () => {
    const tab = await openTab();
    const { id } = tab.draft.get();
    tab.addMessage(user(id, "m1", null, "  What does\nos.path.join do? "));
    expect(tab.draft.get().id).not.toBe(id);
    await vi.waitFor(async () => expect((await openTab()).findConversation(id)).toBeDefined());
    const again = await openTab();
    expect(again.findConversation(id)?.title).toBe("What does os.path.join do?");
    expect((await again.loadTree(id)).leaf).toBe("m1");
    again.renameConversation(id, "Paths");
    again.addMessage(user(id, "m2", null, "Other beginning"));
    expect(again.findConversation(id)?.title).toBe("Paths");
  });

  it("takes settings of a draft along and remembers the model", async () => {
    const tab = await openTab();
    const { id } = tab.draft.get();
    tab.changeSettings(id, { model: "demo", seed: 3 });
    tab.addMessage(user(id, "m1", null));
    expect(tab.findConversation(id)?.settings).toMatchObject({ model: "demo", seed: 3 });
    expect(tab.draft.get().settings).toMatchObject({ model: "demo", seed: null });
  });

  it("loses no message when two tabs write to one conversation", async () => {
    const one = await openTab();
    const { id } = one.draft.get();
    one.addMessage(user(id, "q", null));
    await vi.waitFor(async () => expect((await openTab()).findConversation(id)).toBeDefined());
    const other = await openTab();
    await other.loadTree(id);
    one.addMessage(user(id, "from-one", "q"));
    other.addMessage(user(id, "from-other", "q"));
    for (const tab of [one, other])
      await vi.waitFor(() =>
        expect([...(tab.treeOf(id).get()?.messages.keys() ?? [])].sort()).toEqual(["from-one", "from-other", "q"]),
      );
    const storage = await import("./storage");
    await vi.waitFor(async () => expect(await storage.listMessages(id)).toHaveLength(3));
  });

  it("removes a conversation with its messages, in all tabs", async () => {
    const one = await openTab();
    const { id } = one.draft.get();
    one.addMessage(user(id, "q", null));
    await vi.waitFor(async () => expect((await openTab()).findConversation(id)).toBeDefined());
    const other = await openTab();
    await one.removeConversations([id]);
    await vi.waitFor(() => expect(other.findConversation(id)).toBeUndefined());
    const storage = await import("./storage");
    await vi.waitFor(async () => expect(await storage.listMessages(id)).toEqual([]));
  });

  it("forgets messages whose conversation was removed by a page that went away", async () => {
    const tab = await openTab();
    const storage = await import("./storage");
    await storage.storeMessage({ ...user("gone", "old", null), created: Date.now() - 3_600_000 });
    await storage.storeMessage(user("coming", "new", null));
    await tab.openLibrary();
    await vi.waitFor(async () => expect(await storage.listMessages("gone")).toEqual([]));
    expect(await storage.listMessages("coming")).toHaveLength(1);
  });

  it("finds conversations by what was said in them", async () => {
    const tab = await openTab();
    const storage = await import("./storage");
    const settings = tab.draft.get().settings;
    const wholes = Array.from({ length: 1000 }, (_, n) => ({
      conversation: { id: `c${n}`, title: `T${n}`, named: true, created: n, updated: n, settings, leaf: null },
      messages: [user(`c${n}`, `m${n}`, null, n === 700 ? "A Needle in hay" : "hay")],
    }));
    await tab.importWholes(wholes);
    expect(tab.conversations.get()).toHaveLength(1000);
    expect(tab.conversations.get()?.[0]?.id).toBe("c999");
    expect(await storage.searchMessages("needle", new AbortController().signal)).toEqual(new Set(["c700"]));
  });
});
