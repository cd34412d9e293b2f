import { createStore, type Store } from "./store";

/** A store whose value is kept in the browser's local storage under `name`, and follows changes made in other tabs. */
export function savedStore<T>(name: string, initial: T, isValid: (value: unknown) => value is T): Store<T> {
  const key = `mlxr.${name}`;
  const store = createStore(read());
  window.addEventListener("storage", (event) => {
    if (event.key === key) store.set(read());
  });
  return {
    ...store,
    set(value) {
      store.set(value);
      try {
        localStorage.setItem(key, JSON.stringify(value));
      } catch {
        // Storage is full or forbidden: the setting lasts as long as the tab.
      }
    },
  };

  function read(): T {
    try {
      const value: unknown = JSON.parse(localStorage.getItem(key) ?? "null");
      return isValid(value) ? value : initial;
    } catch {
      return initial;
    }
  }
}
