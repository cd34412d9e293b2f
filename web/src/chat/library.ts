import { makeId } from "../lib/id";
import { savedStore } from "../lib/saved";
import { createStore, type Store } from "../lib/store";
import { tell } from "../lib/toasts";
import { forgetFolders, leaveFolders, refreshFolders } from "../lookup/folders";
import { forgetOrphanFolders } from "../lookup/storage";
import { takeLeft } from "./left";
import * as storage from "./storage";
import { hearTabs, type News, tellTabs } from "./tabs";
import type { Whole } from "./transfer";
import {
  appendMessage,
  EMPTY_TREE,
  makeTree,
  putMessage,
  removeBranch,
  showBranch,
  type Tree,
  takeMessage,
} from "./tree";
import { type Conversation, DEFAULT_SETTINGS, type Message, type Settings } from "./types";

const lastModel = savedStore("chat.model", "", (value): value is string => typeof value === "string");

/** All conversations of this browser, the last used first; null until they are read. */
export const conversations = createStore<readonly Conversation[] | null>(null);

/** Why conversations cannot be kept, in words; null while they can. */
export const storageProblem = createStore<string | null>(null);

/** The conversation that begins with the next message; it is not kept before that. */
export const draft = createStore(makeConversation());

/** The answers that another tab is writing now, by message id. */
export const growingElsewhere = createStore<ReadonlySet<string>>(new Set());

const trees = new Map<string, Store<Tree | null>>();
const heard = new Map<string, number>();
const SILENCE_MS = 2_500;

export function makeConversation(settings: Partial<Settings> = {}): Conversation {
  const now = Date.now();
  const all = { ...DEFAULT_SETTINGS, model: lastModel.get(), ...settings };
  return { id: makeId(), title: "New chat", named: false, created: now, updated: now, settings: all, leaf: null };
}

/** Read the list of conversations; once, when the chat is first shown. */
export async function openLibrary(): Promise<void> {
  try {
    for (const message of takeLeft()) await storage.mendMessage(message);
    sortIn(await storage.listConversations());
    void storage.forgetOrphans().catch(complain);
    void forgetOrphanFolders(new Set(conversations.get()?.map(({ id }) => id)));
  } catch (error) {
    complain(error);
    conversations.set([]);
  }
}

/** The messages of a conversation; null until they are read. */
export function treeOf(id: string): Store<Tree | null> {
  const known = trees.get(id);
  if (known) return known;
  const store = createStore<Tree | null>(id === draft.get().id ? EMPTY_TREE : null);
  trees.set(id, store);
  if (store.get() === null) void readTree(id, store);
  return store;
}

async function readTree(id: string, store: Store<Tree | null>): Promise<void> {
  const messages = await storage.listMessages(id).catch((error) => {
    complain(error);
    return [];
  });
  store.set(makeTree(messages, findConversation(id)?.leaf ?? null));
}

/** Resolves when a conversation's messages are read. */
export async function loadTree(id: string): Promise<Tree> {
  const store = treeOf(id);
  return (
    store.get() ??
    new Promise((resolve) => {
      const end = store.subscribe(() => {
        const tree = store.get();
        if (tree === null) return;
        end();
        resolve(tree);
      });
    })
  );
}

export function findConversation(id: string): Conversation | undefined {
  return id === draft.get().id ? draft.get() : conversations.get()?.find((one) => one.id === id);
}

/** Change a conversation; a draft becomes a conversation that is kept. */
export function saveConversation(conversation: Conversation): void {
  if (conversation.id === draft.get().id) {
    lastModel.set(conversation.settings.model);
    draft.set(makeConversation());
  }
  sortIn([conversation]);
  void storage.storeConversation(conversation).catch(complain);
  tellTabs({ kind: "conversation", conversation });
}

/** Change settings; those of a draft are kept only with its first message. */
export function changeSettings(id: string, change: Partial<Settings>): void {
  const conversation = findConversation(id);
  if (!conversation) return;
  const next = { ...conversation, settings: { ...conversation.settings, ...change } };
  if (change.model !== undefined) lastModel.set(change.model);
  if (id === draft.get().id) draft.set(next);
  else saveConversation(next);
}

export function renameConversation(id: string, title: string): void {
  const conversation = findConversation(id);
  if (conversation && title.trim())
    saveConversation({ ...conversation, title: title.trim().slice(0, 200), named: true });
}

/** Give a conversation another title, unless the person chose the one that it has. */
export function proposeTitle(id: string, title: string): void {
  const conversation = findConversation(id);
  if (conversation && !conversation.named) saveConversation({ ...conversation, title });
}

/** Pin conversations, put them into a folder, or take that back with `undefined`. */
export function arrangeConversations(ids: readonly string[], change: { pinned?: boolean; folder?: string }): void {
  for (const id of ids) {
    const conversation = findConversation(id);
    if (conversation) saveConversation({ ...conversation, ...change });
  }
}

/** Remove conversations; what is told meanwhile brings them back. */
export async function removeConversations(ids: readonly string[]): Promise<void> {
  const chosen = ids.map(findConversation).filter((one) => one !== undefined);
  const wholes = await readWholes(chosen);
  const folders = chosen.map(({ id }) => forgetFolders(id));
  for (const { id } of chosen) {
    takeRemoved(id);
    void storage.forgetConversation(id).catch(complain);
    tellTabs({ kind: "removed", conversation: id });
  }
  const title = chosen[0]?.title ?? "";
  const what =
    chosen.length === 1 ? `“${title.slice(0, 40)}${title.length > 40 ? "…" : ""}”` : `${chosen.length} conversations`;
  tell(`Deleted ${what}.`, async () => {
    await importWholes(wholes);
    for (const bringBack of folders) await (await bringBack)();
  });
}

/** Put a new message behind the branch that is shown, or behind its own parent, and show it. */
export function addMessage(message: Message): void {
  const store = treeOf(message.conversation);
  store.set(appendMessage(store.get() ?? EMPTY_TREE, message));
  keepMessage(message, false);
  const conversation = findConversation(message.conversation);
  if (conversation) saveConversation({ ...titled(conversation, message), leaf: message.id, updated: Date.now() });
}

/** Put a message in the place of its former self. */
export function changeMessage(message: Message): void {
  const store = treeOf(message.conversation);
  store.set(putMessage(store.get() ?? EMPTY_TREE, message));
  keepMessage(message, false);
}

/** Store a message and tell the other tabs; the tree of this tab is not touched. */
export function keepMessage(message: Message, growing: boolean): void {
  void storage.storeMessage(message).catch(complain);
  tellTabs({ kind: "message", message, growing });
}

export function showMessage(conversation: string, id: string): void {
  const store = treeOf(conversation);
  const tree = store.get();
  if (tree) moveTo(conversation, showBranch(tree, id));
}

export function removeMessage(conversation: string, id: string): void {
  const tree = treeOf(conversation).get();
  if (!tree) return;
  const { tree: next, removed } = removeBranch(tree, id);
  moveTo(conversation, next);
  void storage.forgetMessages(removed).catch(complain);
  tellTabs({ kind: "pruned", conversation, ids: removed });
  const messages = removed.flatMap((one) => tree.messages.get(one) ?? []);
  const text =
    removed.length === 1 ? "Deleted the message." : `Deleted the message and ${removed.length - 1} behind it.`;
  tell(text, () => {
    if (!findConversation(conversation)) return;
    for (const message of messages) keepMessage(message, false);
    const now = treeOf(conversation).get() ?? EMPTY_TREE;
    moveTo(conversation, makeTree([...now.messages.values(), ...messages], tree.leaf));
  });
}

export async function importWholes(wholes: readonly Whole[]): Promise<void> {
  await storage.storeWholes(wholes);
  sortIn(wholes.map(({ conversation }) => conversation));
  tellTabs({ kind: "imported" });
}

/** Conversations with all their messages, to export. */
export async function readWholes(chosen: readonly Conversation[]): Promise<Whole[]> {
  return Promise.all(
    chosen.map(async (conversation) => ({ conversation, messages: await storage.listMessages(conversation.id) })),
  );
}

function moveTo(id: string, tree: Tree): void {
  treeOf(id).set(tree);
  const conversation = findConversation(id);
  if (conversation) saveConversation({ ...conversation, leaf: tree.leaf });
}

function titled(conversation: Conversation, message: Message): Conversation {
  if (conversation.named || message.role !== "user" || message.parent !== null) return conversation;
  const title = (message.content || message.files?.[0]?.name || message.pictures?.[0]?.name || "")
    .trim()
    .replace(/\s+/g, " ")
    .slice(0, 80);
  return title ? { ...conversation, title } : conversation;
}

function sortIn(changed: readonly Conversation[]): void {
  const byId = new Map((conversations.get() ?? []).map((one) => [one.id, one]));
  for (const one of changed) byId.set(one.id, one);
  conversations.set([...byId.values()].sort((a, b) => b.updated - a.updated));
}

function takeRemoved(id: string): void {
  trees.delete(id);
  leaveFolders(id);
  conversations.set((conversations.get() ?? []).filter((one) => one.id !== id));
}

function complain(error: unknown): void {
  const reason = error instanceof Error ? error.message : String(error);
  storageProblem.set(`This browser does not keep the conversation: ${reason}. Export it before you close the tab.`);
}

function take(news: News): void {
  if (news.kind !== "conversation" && news.kind !== "folders") storage.forgetTexts();
  if (news.kind === "imported") void openLibrary();
  else if (news.kind === "conversation") sortIn([news.conversation]);
  else if (news.kind === "removed") takeRemoved(news.conversation);
  else if (news.kind === "message") takeNews(news.message, news.growing);
  else if (news.kind === "folders") void refreshFolders(news.conversation);
  else {
    const store = trees.get(news.conversation);
    const tree = store?.get();
    const first = news.ids[0];
    if (store && tree && first !== undefined) store.set(removeBranch(tree, first).tree);
  }
}

function takeNews(message: Message, growing: boolean): void {
  const store = trees.get(message.conversation);
  const tree = store?.get();
  if (store && tree) store.set(takeMessage(tree, message));
  if (growing) heard.set(message.id, Date.now());
  else heard.delete(message.id);
  noteGrowing();
  if (growing) setTimeout(noteGrowing, SILENCE_MS + 50);
}

function noteGrowing(): void {
  const now = Date.now();
  for (const [id, at] of heard) if (now - at > SILENCE_MS) heard.delete(id);
  const ids = growingElsewhere.get();
  if (ids.size !== heard.size || [...heard.keys()].some((id) => !ids.has(id)))
    growingElsewhere.set(new Set(heard.keys()));
}

hearTabs(take);
