import { createStore } from "../lib/store";

/** The message that the keyboard asks to edit; whoever draws it takes it from here. */
export const editing = createStore<string | null>(null);
