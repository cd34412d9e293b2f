import type { Message } from "./types";

/** The messages of a conversation: all branches, and the last message of the one that is shown. Never changed in place. */
export interface Tree {
  readonly messages: ReadonlyMap<string, Message>;
  readonly leaf: string | null;
  /** By parent ("" for none): the messages behind it, oldest first. */
  readonly children: ReadonlyMap<string, readonly string[]>;
}

export const EMPTY_TREE: Tree = { messages: new Map(), leaf: null, children: new Map() };

/** A tree of stored messages. Messages whose parent is missing, or that stand in a circle, begin a branch of their own. */
export function makeTree(messages: Iterable<Message>, leaf: string | null): Tree {
  const byId = new Map<string, Message>();
  for (const message of messages) byId.set(message.id, message);
  const sound = new Set<string>();
  for (const message of byId.values())
    if (!leadsToStart(byId, message, sound)) byId.set(message.id, { ...message, parent: null });
  const sorted = [...byId.values()].sort(compare);
  const children = new Map<string, string[]>();
  for (const { id, parent } of sorted) {
    const list = children.get(parent ?? "");
    if (list) list.push(id);
    else children.set(parent ?? "", [id]);
  }
  const tree: Tree = { messages: byId, leaf: null, children };
  const known = leaf !== null && byId.has(leaf) ? leaf : null;
  return { ...tree, leaf: known ?? newestLeaf(tree) };
}

/** The tree with a message put in: a new one, or one in place of that with its id. The branch shown stays. */
export function putMessage(tree: Tree, message: Message): Tree {
  const messages = new Map(tree.messages).set(message.id, message);
  if (tree.messages.has(message.id)) return { ...tree, messages };
  const key = message.parent ?? "";
  const list = [...(tree.children.get(key) ?? []), message.id].sort((a, b) => compareIds(messages, a, b));
  return { ...tree, messages, children: new Map(tree.children).set(key, list) };
}

/** The tree with a message put in and shown as the last one. */
export function appendMessage(tree: Tree, message: Message): Tree {
  return { ...putMessage(tree, message), leaf: message.id };
}

/** The messages of the branch that is shown, from the first on. */
export function listPath(tree: Tree, leaf: string | null = tree.leaf): Message[] {
  const path: Message[] = [];
  for (let id = leaf; id !== null; ) {
    const message = tree.messages.get(id);
    if (message === undefined) break;
    path.push(message);
    id = message.parent;
  }
  return path.reverse();
}

/** The versions of a message (those with the same parent), and the place of this one among them. */
export function listSiblings(tree: Tree, id: string): { ids: readonly string[]; index: number } {
  const message = tree.messages.get(id);
  const ids = message ? (tree.children.get(message.parent ?? "") ?? []) : [];
  return { ids, index: ids.indexOf(id) };
}

/** The tree that shows the branch through a message, down to where its newest messages lead. */
export function showBranch(tree: Tree, id: string): Tree {
  return tree.messages.has(id) ? { ...tree, leaf: descend(tree, id) } : tree;
}

/** The tree without a message and all that comes behind it; it shows the newest other version, or else the parent. */
export function removeBranch(tree: Tree, id: string): { tree: Tree; removed: string[] } {
  const message = tree.messages.get(id);
  if (message === undefined) return { tree, removed: [] };
  const removed = listBelow(tree, id);
  const gone = new Set(removed);
  const kept = [...tree.messages.values()].filter((one) => !gone.has(one.id));
  const leafStays = tree.leaf !== null && !gone.has(tree.leaf);
  const others = listSiblings(tree, id).ids.filter((other) => other !== id);
  const next = makeTree(kept, leafStays ? tree.leaf : message.parent);
  const other = others.at(-1);
  return { tree: leafStays || other === undefined ? next : showBranch(next, other), removed };
}

/** A message that came from elsewhere (another tab), taken in; what is shown goes on to it if it stands right behind. */
export function takeMessage(tree: Tree, message: Message): Tree {
  const isNew = !tree.messages.has(message.id);
  const next = putMessage(tree, message);
  return isNew && message.parent === tree.leaf ? { ...next, leaf: message.id } : next;
}

function listBelow(tree: Tree, id: string): string[] {
  const found = [id];
  for (let index = 0; index < found.length; index++) found.push(...(tree.children.get(found[index] ?? "") ?? []));
  return found;
}

function descend(tree: Tree, id: string): string {
  let last = id;
  for (let next = last as string | undefined; next !== undefined; next = tree.children.get(last)?.at(-1)) last = next;
  return last;
}

function newestLeaf(tree: Tree): string | null {
  const first = tree.children.get("")?.at(-1);
  return first === undefined ? null : descend(tree, first);
}

/** Whether the parents of a message lead to a beginning. `sound` collects those that do, so that each is followed once. */
function leadsToStart(messages: ReadonlyMap<string, Message>, start: Message, sound: Set<string>): boolean {
  const way = new Set<string>();
  for (let id: string | null = start.id; id !== null && !sound.has(id); ) {
    const message = messages.get(id);
    if (message === undefined || way.has(id)) return message !== undefined && id !== start.id;
    way.add(id);
    id = message.parent;
  }
  for (const id of way) sound.add(id);
  return true;
}

function compareIds(messages: ReadonlyMap<string, Message>, a: string, b: string): number {
  const [one, other] = [messages.get(a), messages.get(b)];
  return one && other ? compare(one, other) : 0;
}

function compare(a: Message, b: Message): number {
  return a.created - b.created || (a.id < b.id ? -1 : a.id > b.id ? 1 : 0);
}
