import type { DBSchema, IDBPObjectStore, StoreNames } from "idb";
import { keepOpen } from "../lib/database";
import type { Whole } from "./transfer";
import type { Conversation, Message } from "./types";

interface Schema extends DBSchema {
  conversations: { key: string; value: Conversation };
  messages: { key: string; value: Message; indexes: { conversation: string } };
}

type Stores = {
  [Name in StoreNames<Schema>]: IDBPObjectStore<Schema, StoreNames<Schema>[], Name, "readwrite">;
};

const ORPHAN_MS = 60_000;
/** Messages may have pictures, and a search has so many in memory. */
const READ_AT_ONCE = 100;
/** Characters of all messages together up to which a search keeps them in memory for the next one. */
const MOST_KEPT = 32 * 1024 ** 2;

type Texts = Map<string, { conversation: string; text: string }>;
/** The texts of all messages in lower case, by id, once they were searched; null where they are not known. */
let texts: Texts | null = null;

let changes = 0;

/** Another tab has changed messages: the next search reads them anew. */
export function forgetTexts(): void {
  changes++;
  texts = null;
}

function noteText({ id, conversation, content }: Message): void {
  changes++;
  texts?.set(id, { conversation, text: content.toLowerCase() });
}

/** The browser's database of conversations. Each message is a record of its own, so that two tabs overwrite nothing. */
const database = keepOpen<Schema>("mlxr", (db) => {
  db.createObjectStore("conversations", { keyPath: "id" });
  db.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
});

/** Make writes, all or none, and ask for the commit at once: a page that is reloaded right after keeps what it showed. */
async function write(make: (stores: Stores) => Promise<unknown>[]): Promise<void> {
  const transaction = (await database()).transaction(["conversations", "messages"], "readwrite");
  const writes = make({
    conversations: transaction.objectStore("conversations"),
    messages: transaction.objectStore("messages"),
  });
  transaction.commit();
  await Promise.all([...writes, transaction.done]);
}

export async function listConversations(): Promise<Conversation[]> {
  return (await database()).getAll("conversations");
}

export async function listMessages(conversation: string): Promise<Message[]> {
  return (await database()).getAllFromIndex("messages", "conversation", conversation);
}

export async function storeConversation(conversation: Conversation): Promise<void> {
  await write(({ conversations }) => [conversations.put(conversation)]);
}

export async function storeMessage(message: Message): Promise<void> {
  noteText(message);
  await write(({ messages }) => [messages.put(message)]);
}

/** Put what is known of a message over what is stored of it, if it is stored. */
export async function mendMessage(message: Message): Promise<void> {
  const store = (await database()).transaction("messages", "readwrite").store;
  const stored = await store.get(message.id);
  if (!stored) return;
  noteText(message);
  await store.put({ ...stored, ...message } as Message);
}

/** Store whole conversations, all or none. */
export async function storeWholes(wholes: readonly Whole[]): Promise<void> {
  for (const { messages } of wholes) messages.forEach(noteText);
  await write(({ conversations, messages }) =>
    wholes.flatMap((whole) => [
      conversations.put(whole.conversation),
      ...whole.messages.map((message) => messages.put(message)),
    ]),
  );
}

export async function forgetMessages(ids: readonly string[]): Promise<void> {
  changes++;
  for (const id of ids) texts?.delete(id);
  await write(({ messages }) => ids.map((id) => messages.delete(id)));
}

/** Forget a conversation, at once, and then its messages. */
export async function forgetConversation(id: string): Promise<void> {
  await write(({ conversations }) => [conversations.delete(id)]);
  await forgetMessages(await (await database()).getAllKeysFromIndex("messages", "conversation", id));
}

/** Forget messages that lost their conversation: the page was left before it could forget them. */
export async function forgetOrphans(): Promise<void> {
  const db = await database();
  const known = new Set(await db.getAllKeys("conversations"));
  const index = db.transaction("messages").store.index("conversation");
  const orphans: string[] = [];
  for (let cursor = await index.openCursor(null, "nextunique"); cursor; cursor = await cursor.continue()) {
    const { conversation, created } = cursor.value;
    // Another tab may have stored a first message and not yet its conversation.
    if (!known.has(conversation) && Date.now() - created > ORPHAN_MS) orphans.push(conversation);
  }
  for (const id of orphans) await forgetConversation(id);
}

/** The conversations in whose messages a text occurs, whatever its case. The signal ends the search early. */
export async function searchMessages(text: string, signal: AbortSignal): Promise<Set<string>> {
  const wanted = text.toLowerCase();
  const found = new Set<string>();
  if (texts) {
    for (const { conversation, text } of texts.values()) if (text.includes(wanted)) found.add(conversation);
    return found;
  }
  const read: Texts = new Map();
  const before = changes;
  let size = 0;
  const store = (await database()).transaction("messages").store;
  let last: string | undefined;
  while (!signal.aborted) {
    const some = await store.getAll(last === undefined ? null : IDBKeyRange.lowerBound(last, true), READ_AT_ONCE);
    for (const { id, conversation, content } of some) {
      const text = content.toLowerCase();
      if (text.includes(wanted)) found.add(conversation);
      size += text.length;
      if (size <= MOST_KEPT) read.set(id, { conversation, text });
    }
    last = some.at(-1)?.id;
    if (some.length < READ_AT_ONCE) {
      if (size <= MOST_KEPT && changes === before) texts = read;
      break;
    }
  }
  return found;
}
