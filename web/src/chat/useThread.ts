import { useMemo, useSyncExternalStore } from "react";
import { useStore } from "../lib/store";
import { type Run, runs } from "./answering";
import { conversations, draft, findConversation, growingElsewhere, treeOf } from "./library";
import { listPath, type Tree } from "./tree";
import type { AssistantMessage, Conversation, Message, Status } from "./types";

/** The conversation that an address names, or the one that is about to begin; undefined if there is none of that id. */
export function useConversation(id: string): Conversation | undefined {
  useStore(conversations);
  const next = useStore(draft);
  return id === "" ? next : findConversation(id);
}

/** The messages of a conversation and the branch that is shown; null until they are read. */
export function useThread(id: string): { tree: Tree; path: Message[] } | null {
  const tree = useStore(treeOf(id));
  return useMemo(() => tree && { tree, path: listPath(tree) }, [tree]);
}

/** The answer as it is at this frame, how it stands, and its run if it grows in this tab. */
export function useAnswer(message: AssistantMessage): {
  message: AssistantMessage;
  status: Status;
  run: Run | undefined;
} {
  const run = useStore(runs).get(message.id);
  const growsElsewhere = useStore(growingElsewhere).has(message.id);
  const shown = useMaybe(run?.shown) ?? message;
  const isLeft = message.status === "growing" && !run && !growsElsewhere;
  return { message: shown, status: isLeft ? "interrupted" : shown.status, run };
}

/** The answer of this branch that grows in this tab. */
export function useRunOf(path: readonly Message[]): Run | undefined {
  const all = useStore(runs);
  const last = path.at(-1);
  return last && all.get(last.id);
}

/** A value of a store that may not be there. */
export function useMaybe<T>(
  store: { get(): T; subscribe(listener: () => void): () => void } | undefined,
): T | undefined {
  return useSyncExternalStore(store?.subscribe ?? neverChanges, () => store?.get());
}

function neverChanges(): () => void {
  return () => undefined;
}
