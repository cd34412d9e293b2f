import { type Dispatch, type SetStateAction, useCallback, useState } from "react";

const kept = new Map<string, unknown>();

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
