import type { DBSchema, IDBPDatabase } from "idb";
import { keepOpen } from "../lib/database";
import type { Passage } from "./passages";

/** A folder, or a single file, that the questions of a conversation are looked up in. */
export interface Folder {
  conversation: string;
  name: string;
  added: number;
  files: number;
  passages: number;
  /** The model that makes its vectors; null where passages are found by their words. */
  model: Embedder | null;
  /** Why there are no vectors, in words. */
  reason: string;
  /** What was left out of it, a sentence for each reason. */
  left: string[];
}

/** A model that is made for vectors. The digest is that of its files: another model may get its name. */
export interface Embedder {
  name: string;
  digest: string;
}

export interface WholeFolder {
  folder: Folder;
  passages: Passage[];
}

type FolderKey = [conversation: string, name: string];
type VectorKey = [digest: string, text: string];

interface Schema extends DBSchema {
  folders: { key: FolderKey; value: Folder };
  passages: { key: FolderKey; value: Passage[] };
  vectors: { key: VectorKey; value: Float32Array };
}

const ORPHAN_MS = 60_000;

/** What the browser does not keep, for as long as the tab. */
const memory = { wholes: new Map<string, WholeFolder>(), vectors: new Map<string, Float32Array>() };
const keyOf = (...parts: string[]) => JSON.stringify(parts);

/** A database beside that of the conversations, so that tabs with an older page can still use theirs. */
const database = keepOpen<Schema>("mlxr.folders", (db) => {
  db.createObjectStore("folders", { keyPath: ["conversation", "name"] });
  db.createObjectStore("passages");
  db.createObjectStore("vectors");
});

/** The keys of a conversation's folders, or of a model's vectors. */
function below(first: string): IDBKeyRange {
  return IDBKeyRange.bound([first], [first, []]);
}

/** Keep a folder in the place of one of its name. Answers why the browser does not, in words; then this tab does. */
export async function keepFolder({ folder, passages }: WholeFolder): Promise<string | null> {
  const key = keyOf(folder.conversation, folder.name);
  try {
    const transaction = (await database()).transaction(["folders", "passages"], "readwrite");
    const writes = [
      transaction.objectStore("folders").put(folder),
      transaction.objectStore("passages").put(passages, [folder.conversation, folder.name]),
    ];
    transaction.commit();
    await Promise.all([...writes, transaction.done]);
    memory.wholes.delete(key);
    return null;
  } catch (error) {
    memory.wholes.set(key, { folder, passages });
    return error instanceof Error ? error.message : String(error);
  }
}

/** The folders of a conversation, the first added first. */
export async function listFolders(conversation: string): Promise<Folder[]> {
  const kept = await ask((db) => db.getAll("folders", below(conversation)), []);
  const held = listHeld(conversation).map(({ folder }) => folder);
  return [...kept.filter(({ name }) => !held.some((one) => one.name === name)), ...held].sort(
    (a, b) => a.added - b.added,
  );
}

export async function readPassages({ conversation, name }: Folder): Promise<Passage[]> {
  const held = memory.wholes.get(keyOf(conversation, name));
  return held?.passages ?? (await ask((db) => db.get("passages", [conversation, name]), undefined)) ?? [];
}

/** Forget folders of a conversation, all of them or those of these names; answers what they were. */
export async function takeFolders(conversation: string, names?: readonly string[]): Promise<WholeFolder[]> {
  const chosen = (await listFolders(conversation)).filter(({ name }) => names === undefined || names.includes(name));
  const wholes = await Promise.all(chosen.map(async (folder) => ({ folder, passages: await readPassages(folder) })));
  for (const { name } of chosen) {
    memory.wholes.delete(keyOf(conversation, name));
    await ask(async (db) => {
      const transaction = db.transaction(["folders", "passages"], "readwrite");
      const deletes = [
        transaction.objectStore("folders").delete([conversation, name]),
        transaction.objectStore("passages").delete([conversation, name]),
      ];
      await Promise.all([...deletes, transaction.done]);
    }, undefined);
  }
  return wholes;
}

/** Forget folders that lost their conversation: the page was left before it could forget them. */
export async function forgetOrphanFolders(known: ReadonlySet<string>): Promise<void> {
  const all = await ask((db) => db.getAll("folders"), []);
  const orphans = all.filter(({ conversation, added }) => !known.has(conversation) && Date.now() - added > ORPHAN_MS);
  for (const { conversation, name } of orphans) await takeFolders(conversation, [name]);
}

/** The vectors that a model made, by their texts. */
export async function readVectors(digest: string, texts: Iterable<string>): Promise<Map<string, Float32Array>> {
  const [keys, values] = await ask(
    async (db) => {
      const store = db.transaction("vectors").store;
      return Promise.all([store.getAllKeys(below(digest)), store.getAll(below(digest))]);
    },
    [[], []],
  );
  const kept = new Map(keys.map(([, text], at) => [text, values[at]]));
  const found = new Map<string, Float32Array>();
  for (const text of texts) {
    const vector = memory.vectors.get(keyOf(digest, text)) ?? kept.get(text);
    if (vector) found.set(text, vector);
  }
  return found;
}

export async function keepVectors(digest: string, vectors: ReadonlyMap<string, Float32Array>): Promise<void> {
  try {
    const transaction = (await database()).transaction("vectors", "readwrite");
    const writes = [...vectors].map(([text, vector]) => transaction.store.put(vector, [digest, text]));
    await Promise.all([...writes, transaction.done]);
  } catch {
    for (const [text, vector] of vectors) memory.vectors.set(keyOf(digest, text), vector);
  }
}

/** Forget the vectors of texts that no folder has any more. */
export async function sweepVectors(): Promise<void> {
  await ask(async (db) => {
    const transaction = db.transaction(["passages", "vectors"], "readwrite");
    const wanted = new Set<string>();
    for (let at = await transaction.objectStore("passages").openCursor(); at; at = await at.continue())
      for (const { text } of at.value) wanted.add(text);
    const store = transaction.objectStore("vectors");
    const gone = (await store.getAllKeys()).filter(([, text]) => !wanted.has(text));
    await Promise.all([...gone.map((key) => store.delete(key)), transaction.done]);
  }, undefined);
}

function listHeld(conversation: string): WholeFolder[] {
  return [...memory.wholes.values()].filter(({ folder }) => folder.conversation === conversation);
}

/** What the database answers; where it does not, that it has nothing. */
async function ask<T>(question: (db: IDBPDatabase<Schema>) => Promise<T>, otherwise: T): Promise<T> {
  try {
    return await question(await database());
  } catch {
    return otherwise;
  }
}
