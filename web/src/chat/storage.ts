import { type DBSchema, type IDBPDatabase, type IDBPObjectStore, openDB, type StoreNames } from "idb";
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

let opened: Promise<IDBPDatabase<Schema>> | null = null;

/** The browser's database of conversations. Each message is a record of its own, so that two tabs overwrite nothing. */
function database(): Promise<IDBPDatabase<Schema>> {
  opened ??= openDB<Schema>("mlxr", 1, {
    upgrade(db) {
      db.createObjectStore("conversations", { keyPath: "id" });
      db.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    },
    blocking() {
      void opened?.then((db) => db.close());
      opened = null;
    },
    terminated() {
      opened = null;
    },
  });
  opened.catch(() => {
    opened = null;
  });
  return opened;
}

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
  await write(({ messages }) => [messages.put(message)]);
}

/** Put what is known of a message over what is stored of it, if it is stored. */
export async function mendMessage(message: Message): Promise<void> {
  const store = (await database()).transaction("messages", "readwrite").store;
  const stored = await store.get(message.id);
  if (stored) await store.put({ ...stored, ...message } as Message);
}

/** Store whole conversations, all or none. */
export async function storeWholes(wholes: readonly Whole[]): Promise<void> {
  await write(({ conversations, messages }) =>
    wholes.flatMap((whole) => [
      conversations.put(whole.conversation),
      ...whole.messages.map((message) => messages.put(message)),
    ]),
  );
}

export async function forgetMessages(ids: readonly string[]): Promise<void> {
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
  const store = (await database()).transaction("messages").store;
  let last: string | undefined;
  while (!signal.aborted) {
    const some = await store.getAll(last === undefined ? null : IDBKeyRange.lowerBound(last, true), READ_AT_ONCE);
    for (const { conversation, content } of some) if (content.toLowerCase().includes(wanted)) found.add(conversation);
    last = some.at(-1)?.id;
    if (some.length < READ_AT_ONCE) break;
  }
  return found;
}
