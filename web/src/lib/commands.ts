import { useEffect, useRef } from "react";

/** What the keyboard can ask of whatever view is shown. */
export const COMMANDS = {
  newChat: ["Ctrl+Shift+O", "New chat"],
  search: ["Ctrl+K", "Search the conversations"],
  sidebar: ["Ctrl+B", "Show or hide the conversations"],
  settings: ["Ctrl+,", "Show or hide the settings of the conversation"],
  model: ["Alt+M", "Choose the model"],
  write: ["/", "Write a message"],
  editLast: ["↑", "Edit the last question, in an empty message"],
  regenerate: ["Alt+R", "Regenerate the last answer"],
  copyLast: ["Alt+C", "Copy the last answer"],
  help: ["?", "Show these shortcuts"],
} as const satisfies Record<string, readonly [keys: string, what: string]>;

export type Command = keyof typeof COMMANDS;

const listeners = new Map<Command, Set<() => void>>();

/** Do what a command means here; whether anything could. */
export function runCommand(name: Command): boolean {
  const all = listeners.get(name);
  for (const listener of all ?? []) listener();
  return Boolean(all?.size);
}

/** Do `action` when the command is given while the component is shown. */
export function useCommand(name: Command, action: () => void): void {
  const latest = useRef(action);
  latest.current = action;
  useEffect(() => {
    const listener = () => latest.current();
    const all = listeners.get(name) ?? new Set();
    listeners.set(name, all.add(listener));
    return () => void all.delete(listener);
  }, [name]);
}

/** The command of a key, null for none. Plain keys count only outside fields, and none in an open window. */
export function readKey(event: KeyboardEvent): Command | null {
  const target = event.target instanceof Element ? event.target : null;
  if (target?.closest("dialog, [role=menu], [role=dialog]")) return null;
  const isTyping = target?.closest("input, textarea, select, [contenteditable]") != null;
  const control = event.ctrlKey || event.metaKey;
  if (control && event.shiftKey && event.code === "KeyO") return "newChat";
  if (control && !event.shiftKey && !event.altKey) return WITH_CONTROL[event.key.toLowerCase()] ?? null;
  if (event.altKey && !control) return WITH_ALT[event.code] ?? null;
  if (isTyping || control) return null;
  return event.key === "/" ? "write" : event.key === "?" ? "help" : null;
}

const WITH_CONTROL: Readonly<Record<string, Command>> = { k: "search", b: "sidebar", ",": "settings" };
const WITH_ALT: Readonly<Record<string, Command>> = { KeyM: "model", KeyR: "regenerate", KeyC: "copyLast" };
