import { createStore } from "./store";

/** What was just done, and what takes it back. */
export interface Toast {
  id: number;
  text: string;
  undo: (() => void) | null;
}

/** What is told for a moment at the foot of the page, the newest last. */
export const toasts = createStore<readonly Toast[]>([]);

const SHOWN_MS = 10_000;
let count = 0;

/** Tell what was done; `undo` takes it back for as long as it is told. */
export function tell(text: string, undo: (() => void) | null = null): void {
  const id = ++count;
  toasts.set([...toasts.get().slice(-2), { id, text, undo }]);
  setTimeout(() => dismiss(id), SHOWN_MS);
}

export function dismiss(id: number): void {
  toasts.set(toasts.get().filter((toast) => toast.id !== id));
}
