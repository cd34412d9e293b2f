import { type DBSchema, type IDBPDatabase, openDB } from "idb";
import type { Whole } from "./transfer";
import type { Conversation, Message } from "./types";

interface Schema extends DBSchema {
  conversations: { key: string; value: Conversation };
  messages: { key: string; value: Message; indexes: { conversation: string } };
}

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

export async function listConversations(): Promise<Conversation[]> {
  return (await database()).getAll("conversations");
}

export async function listMessages(conversation: string): Promise<Message[]> {
  return (await database()).getAllFromIndex("messages", "conversation", conversation);
}

export async function storeConversation(conversation: Conversation): Promise<void> {
  await (await database()).put("conversations", conversation);
}

export async function storeMessage(message: Message): Promise<void> {
  await (await database()).put("messages", message);
}

/** Put what is known of a message over what is stored of it, if it is stored. */
export async function mendMessage(message: Message): Promise<void> {
  const store = (await database()).transaction("messages", "readwrite").store;
  const stored = await store.get(message.id);
  if (stored) await store.put({ ...stored, ...message } as Message);
}

/** Store whole conversations, all or none. */
export async function storeWholes(wholes: readonly Whole[]): Promise<void> {
  const transaction = (await database()).transaction(["conversations", "messages"], "readwrite");
  const writes: Promise<unknown>[] = [];
  for (const { conversation, messages } of wholes) {
    writes.push(transaction.objectStore("conversations").put(conversation));
    for (const message of messages) writes.push(transaction.objectStore("messages").put(message));
  }
  await Promise.all([...writes, transaction.done]);
}

export async function forgetMessages(ids: readonly string[]): Promise<void> {
  const transaction = (await database()).transaction("messages", "readwrite");
  await Promise.all([...ids.map((id) => transaction.store.delete(id)), transaction.done]);
}

export async function forgetConversation(id: string): Promise<void> {
  const transaction = (await database()).transaction(["conversations", "messages"], "readwrite");
  const messages = transaction.objectStore("messages");
  const keys = await messages.index("conversation").getAllKeys(id);
  await Promise.all([
    transaction.objectStore("conversations").delete(id),
    ...keys.map((key) => messages.delete(key)),
    transaction.done,
  ]);
}

/** The conversations in whose messages a text occurs, whatever its case. The signal ends the search early. */
export async function searchMessages(text: string, signal: AbortSignal): Promise<Set<string>> {
  const wanted = text.toLowerCase();
  const found = new Set<string>();
  const store = (await database()).transaction("messages").store;
  let last: string | undefined;
  while (!signal.aborted) {
    const some = await store.getAll(last === undefined ? null : IDBKeyRange.lowerBound(last, true), 500);
    for (const { conversation, content } of some) if (content.toLowerCase().includes(wanted)) found.add(conversation);
    last = some.at(-1)?.id;
    if (some.length < 500) break;
  }
  return found;
}
