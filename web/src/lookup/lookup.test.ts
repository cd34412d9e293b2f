import "fake-indexeddb/auto";
import { beforeEach, describe, expect, it, vi } from "vitest";
import { writeRequest } from "../chat/wire";

const SIZE = 26;
let models: { name: string; pooling: number | null; digest: string }[] = [];
let embedded: { kind: string; texts: string[]; model: string }[] = [];
let isAway = false;
/** Called before each answer with vectors. */
let onEmbed: () => void | Promise<void> = () => {};

/** A server whose vectors count letters. */
function answer(path: string, init: RequestInit): unknown {
  const body = init.body ? JSON.parse(String(init.body)) : null;
  if (path === "/api/tags")
    return { models: models.map(({ name, digest }) => ({ name: `${name}:latest`, digest, size: 1, details: {} })) };
  if (path === "/api/ps") return { models: [{ name: "writer:latest", context_length: 4000 }] };
  if (path === "/v1/admin/info") return { default_model: "writer" };
  if (path === "/api/show") {
    const pooling = models.find(({ name }) => `${name}:latest` === body.model)?.pooling ?? null;
    return {
      model_info: { "general.architecture": "bert", ...(pooling !== null && { "bert.pooling_type": pooling }) },
    };
  }
  if (path !== "/v1/embeddings") throw new Error(path);
  embedded.push({ kind: body.input_type, texts: body.input, model: body.model });
  return { data: (body.input as string[]).map((text, index) => ({ index, embedding: countLetters(text) })) };
}

function countLetters(text: string): string {
  const counts = new Float32Array(SIZE);
  for (const letter of text.toLowerCase()) {
    const place = letter.charCodeAt(0) - 97;
    if (place >= 0 && place < SIZE) counts[place] = (counts[place] ?? 0) + 1;
  }
  const length = Math.hypot(...counts) || 1;
  return btoa(String.fromCharCode(...new Uint8Array(counts.map((one) => one / length).buffer)));
}

beforeEach(async () => {
  for (const name of ["mlxr", "mlxr.folders"]) indexedDB.deleteDatabase(name);
  [models, embedded, isAway, onEmbed] = [[{ name: "writer", pooling: null, digest: "w" }], [], false, () => {}];
  vi.stubGlobal("fetch", async (path: string, init: RequestInit) => {
    init.signal?.throwIfAborted();
    if (isAway) throw new TypeError("away");
    if (path === "/v1/embeddings") await onEmbed();
    return new Response(JSON.stringify(answer(path, init)));
  });
});

/** A tab with a conversation that has one folder. */
async function openTab(files: Record<string, string>, title = "notes") {
  vi.resetModules();
  const [library, folders, storage] = await Promise.all([
    import("../chat/library"),
    import("./folders"),
    import("./storage"),
  ]);
  const { id } = library.draft.get();
  const found = Object.entries(files).map(([path, text]) => ({
    path: `${title}/${path}`,
    file: new File([text], path),
  }));
  const attach = () => folders.attachFolder(id, title, async () => found);
  location.hash = `#/chat/${id}`;
  await vi.waitFor(() => expect(folders.foldersOf(id).get()).toEqual([]));
  await attach();
  const find = (question: string, used = 0) =>
    folders.findPassages(id, question, "", used, new AbortController().signal);
  return { id, library, folders, storage, attach, find };
}

const NOTES = {
  "cat.md": "# Cats\n\nA cat purrs.",
  "dog.md": "# Dogs\n\nA dog barks.",
  "x.bin": "zz",
  ".hid": "hidden",
};

describe("a folder", () => {
  it("makes a conversation of a draft, and is looked up by words where no model makes vectors", async () => {
    const { id, library, folders, find } = await openTab(NOTES);
    expect(library.findConversation(id)?.title).toBe("notes");
    const [folder] = folders.foldersOf(id).get() ?? [];
    expect(folder).toMatchObject({ name: "notes", files: 2, passages: 2, model: null });
    expect(folder?.reason).toContain("mlxr pull");
    expect(folder?.left).toHaveLength(2);
    expect(folders.notices.get().get(id)).toEqual(folder?.left);
    expect(await find("Which one barks?")).toEqual([{ path: "notes/dog.md", line: 1, text: "# Dogs\n\nA dog barks." }]);
    expect(await find("zebra")).toEqual([]);
    expect(await find("  ")).toBeUndefined();
    expect(embedded).toEqual([]);
  });

  it("is looked up by the vectors of a model that is made for them, each text computed once", async () => {
    models.push({ name: "seeker", pooling: 1, digest: "s" }, { name: "ranker", pooling: 4, digest: "r" });
    const { id, folders, find } = await openTab({ ...NOTES, "again.md": NOTES["cat.md"] });
    expect(folders.foldersOf(id).get()?.[0]).toMatchObject({ model: { name: "seeker", digest: "s" }, passages: 3 });
    expect(embedded).toEqual([{ kind: "document", model: "seeker", texts: [NOTES["cat.md"], NOTES["dog.md"]] }]);
    expect((await find("cats purr"))?.map(({ path }) => path)).toEqual(["notes/again.md", "notes/dog.md"]);
    expect(embedded.at(-1)).toMatchObject({ kind: "query", texts: ["cats purr"] });
    const other = await openTab({ ...NOTES, "new.md": "Birds sing." });
    expect(other.id).not.toBe(id);
    expect(embedded.slice(2)).toEqual([{ kind: "document", model: "seeker", texts: ["Birds sing."] }]);
  });

  it("says why a question cannot be looked up", async () => {
    models.push({ name: "seeker", pooling: 3, digest: "s" });
    const { find } = await openTab(NOTES);
    isAway = true;
    await expect(find("cats")).rejects.toThrow("The server does not answer");
    isAway = false;
    models = [{ name: "seeker", pooling: 3, digest: "other" }];
    await expect(find("cats")).rejects.toThrow("“seeker”, which made the vectors of “notes”, is gone");
  });

  it("keeps the vectors that there are when the rest is stopped, and goes on with them", async () => {
    models.push({ name: "seeker", pooling: 1, digest: "s" });
    const many = Object.fromEntries(Array.from({ length: 20 }, (_, index) => [`${index}.md`, `text ${index}`]));
    onEmbed = () => void import("./folders").then(({ attaching }) => [...attaching.get().values()][0]?.stop());
    const { id, folders } = await openTab(many);
    expect(folders.foldersOf(id).get()?.[0]).toMatchObject({ passages: 20, model: null });
    expect(folders.attaching.get().size).toBe(0);
    const before = embedded.flatMap(({ texts }) => texts).length;
    onEmbed = () => {};
    const [folder] = folders.foldersOf(id).get() ?? [];
    if (folder) await folders.computeVectors(folder);
    expect(folders.foldersOf(id).get()?.[0]).toMatchObject({ model: { name: "seeker" }, reason: "" });
    expect(embedded.flatMap(({ texts }) => texts)).toHaveLength(20);
    expect(before).toBe(16);
  });

  it("without any text is not attached, and says so", async () => {
    const { id, library, folders } = await openTab({ "a.png": "x" });
    expect(folders.foldersOf(id).get()).toEqual([]);
    expect(folders.notices.get().get(id)?.[0]).toBe("“notes” has no text that can be looked up.");
    expect(library.draft.get().id).toBe(id);
  });

  it("is not attached when it is cancelled while its last file is read", async () => {
    const { id, folders } = await openTab({ "a.png": "x" });
    const file = new File(["Cats purr."], "cat.md");
    const read = file.arrayBuffer.bind(file);
    file.arrayBuffer = () => {
      folders.attaching.get().get(id)?.stop();
      return read();
    };
    await folders.attachFolder(id, "one", async () => [{ path: "one/cat.md", file }]);
    expect(folders.foldersOf(id).get()).toEqual([]);
  });

  it("waits for those before it, in whatever conversation, and can be cancelled meanwhile", async () => {
    const { folders, library, id } = await openTab(NOTES);
    models.push({ name: "seeker", pooling: 1, digest: "s" });
    let release = () => {};
    onEmbed = () => new Promise((resolve) => (release = resolve));
    const [folder] = folders.foldersOf(id).get() ?? [];
    if (!folder) throw new Error("no folder");
    const first = folders.computeVectors(folder);
    await vi.waitFor(() => expect(folders.attaching.get().get(id)?.step).toBe("computes"));
    const other = library.draft.get().id;
    folders.foldersOf(other);
    const list = async () => [{ path: "b.md", file: new File(["Birds sing."], "b.md") }];
    const second = folders.attachFolder(other, "cancelled", list);
    const third = folders.attachFolder(other, "b.md", list);
    const step = () => folders.attaching.get().get(other);
    expect(step()).toMatchObject({ name: "cancelled", step: "waits" });
    step()?.stop();
    expect(step()).toMatchObject({ name: "b.md", step: "waits" });
    onEmbed = () => {};
    await vi.waitFor(() => {
      release();
      expect(folders.attaching.get().has(id)).toBe(false);
    });
    await Promise.all([first, second, third]);
    expect(folders.attaching.get().size).toBe(0);
    expect(
      folders
        .foldersOf(other)
        .get()
        ?.map(({ name }) => name),
    ).toEqual(["b.md"]);
  });

  it("is neither finished nor kept once another tab has deleted its conversation", async () => {
    const { id, folders, storage } = await openTab(NOTES);
    models.push({ name: "seeker", pooling: 1, digest: "s" });
    const other = new BroadcastChannel("mlxr.chat");
    onEmbed = async () => {
      await storage.takeFolders(id);
      other.postMessage({ kind: "removed", conversation: id });
      await vi.waitFor(() => expect(folders.foldersOf(id).get()).toEqual([]));
    };
    const [folder] = folders.foldersOf(id).get() ?? [];
    if (folder) await folders.computeVectors(folder);
    other.close();
    expect(await storage.listFolders(id)).toEqual([]);
  });

  it("that another tab put another one in the place of stays that one", async () => {
    const { id, folders, storage } = await openTab(NOTES);
    models.push({ name: "seeker", pooling: 1, digest: "s" });
    const [folder] = folders.foldersOf(id).get() ?? [];
    if (!folder) throw new Error("no folder");
    const passages = [{ path: "notes/new.md", line: 1, text: "New" }];
    onEmbed = async () => {
      await storage.keepFolder({ folder: { ...folder, added: folder.added + 1, passages: 1 }, passages });
      await folders.refreshFolders(id);
    };
    await folders.computeVectors(folder);
    expect(await storage.readPassages(folder)).toEqual(passages);
  });

  it("whose passages cannot be read is neither looked up nor kept as an empty one", async () => {
    const { id, folders, storage, find } = await openTab(NOTES);
    const [folder] = folders.foldersOf(id).get() ?? [];
    if (!folder) throw new Error("no folder");
    const get = vi.spyOn(IDBObjectStore.prototype, "get").mockImplementation(() => {
      throw new DOMException("The disk is away", "UnknownError");
    });
    await expect(find("barks")).rejects.toThrow("This browser does not give the passages of “notes”.");
    await folders.computeVectors(folder);
    expect(folders.notices.get().get(id)?.at(-1)).toContain("does not give the passages");
    get.mockRestore();
    expect(await storage.readPassages(folder)).toHaveLength(2);
    expect(await find("barks")).toHaveLength(1);
  });

  it("goes with its conversation, and comes back with it", async () => {
    const { id, library, folders, storage } = await openTab(NOTES);
    await library.removeConversations([id]);
    await vi.waitFor(async () => expect(await storage.listFolders(id)).toEqual([]));
    const { toasts } = await import("../lib/toasts");
    toasts.get().at(-1)?.undo?.();
    await vi.waitFor(async () => expect(await storage.listFolders(id)).toHaveLength(1));
    const [folder] = (await storage.listFolders(id)) ?? [];
    expect(folder && (await storage.readPassages(folder))).toHaveLength(2);
    if (folder) await folders.removeFolder(folder);
    await vi.waitFor(() => expect(folders.foldersOf(id).get()).toEqual([]));
  });

  it("that the browser does not keep lasts as long as the tab, and that is told", async () => {
    const put = vi.spyOn(IDBObjectStore.prototype, "put").mockImplementation(() => {
      throw new DOMException("The disk is full", "QuotaExceededError");
    });
    const { id, folders, find } = await openTab(NOTES);
    expect(folders.notices.get().get(id)?.at(-1)).toMatch(/^This browser does not keep “notes” \(.*The disk is full\)/);
    expect(await find("barks")).toHaveLength(1);
    put.mockRestore();
  });
});

describe("what is stored", () => {
  it("is swept: vectors without a text, folders without a conversation", async () => {
    models.push({ name: "seeker", pooling: 1, digest: "s" });
    const { id, storage } = await openTab(NOTES);
    await storage.sweepVectors();
    const texts = [NOTES["cat.md"], NOTES["dog.md"]];
    expect((await storage.readVectors("s", texts)).size).toBe(2);
    await storage.forgetOrphanFolders(new Set());
    expect(await storage.listFolders(id)).toHaveLength(1); // it is young
    vi.spyOn(Date, "now").mockReturnValue(Date.now() + 100_000);
    await storage.forgetOrphanFolders(new Set([id]));
    expect(await storage.listFolders(id)).toHaveLength(1);
    await storage.forgetOrphanFolders(new Set());
    expect(await storage.listFolders(id)).toEqual([]);
    await storage.sweepVectors();
    expect((await storage.readVectors("s", texts)).size).toBe(0);
  });
});

it("puts passages before the question, each with its number, file and line", async () => {
  const { DEFAULT_SETTINGS } = await import("../chat/types");
  const passages = [
    { path: "n/a.md", line: 3, text: "First." },
    { path: "n/b.md", line: 1, text: "Second." },
  ];
  const base = { id: "1", conversation: "c", parent: null, created: 0, role: "user" as const, content: "Why?" };
  const write = (more: object) => writeRequest([{ ...base, ...more }], DEFAULT_SETTINGS, 0, false).messages[0]?.content;
  expect(write({ passages })).toBe(
    "[1] n/a.md:3\nFirst.\n\n[2] n/b.md:1\nSecond.\n\n" +
      "Answer from these passages and name their numbers, such as [1]: Why?",
  );
  expect(write({ passages: [] })).toBe("Why?");
  expect(write({ passages, files: [{ name: "c.txt", text: "whole" }] })).toMatch(
    /^c\.txt:\n```txt\nwhole\n```\n\n\[1\]/,
  );
});
