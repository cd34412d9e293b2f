import { type Dispatch, type SetStateAction, useCallback, useState } from "react";

const SAVED = "mlxr.kept";
const MOST_CHARACTERS = 1_000_000;
const kept = new Map<string, unknown>(takeSaved());

/** Put the states aside for the page that is loaded next in this tab. */
export function saveKept(): void {
  try {
    const text = JSON.stringify([...kept]);
    if (text.length <= MOST_CHARACTERS) sessionStorage.setItem(SAVED, text);
  } catch {
    // Storage is full or forbidden: they begin anew.
  }
}

function takeSaved(): [string, unknown][] {
  try {
    const value: unknown = JSON.parse(sessionStorage.getItem(SAVED) ?? "[]");
    sessionStorage.removeItem(SAVED);
    return Array.isArray(value) ? value : [];
  } catch {
    return [];
  }
}

/** State that outlives its component, under `name`: what is scrolled away is drawn anew when it comes back. */
export function useKept<T>(name: string, initial: T): [T, Dispatch<SetStateAction<T>>] {
  const [value, setValue] = useState<T>(() => (kept.has(name) ? (kept.get(name) as T) : initial));
  const set = useCallback(
    (change: SetStateAction<T>) =>
      setValue((before) => {
        const next = change instanceof Function ? change(before) : change;
        kept.set(name, next);
        return next;
      }),
    [name],
  );
  return [value, set];
}

/** Forget states, so that they begin anew. */
export function forgetKept(...names: string[]): void {
  for (const name of names) kept.delete(name);
}
