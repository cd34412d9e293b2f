import type { Conversation, Message } from "./types";

/** What the tabs of this page tell each other. */
export type News =
  | { kind: "conversation"; conversation: Conversation }
  | { kind: "message"; message: Message; growing: boolean }
  | { kind: "removed"; conversation: string }
  | { kind: "pruned"; conversation: string; ids: string[] }
  | { kind: "imported" }
  | { kind: "folders"; conversation: string };

const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("mlxr.chat") : null;

export function tellTabs(news: News): void {
  channel?.postMessage(news);
}

export function hearTabs(listener: (news: News) => void): void {
  channel?.addEventListener("message", (event: MessageEvent<News>) => listener(event.data));
}
