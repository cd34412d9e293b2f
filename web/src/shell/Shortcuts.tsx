import { useEffect, useState } from "react";
import { COMMANDS, readKey, runCommand, useCommand } from "../lib/commands";
import { go } from "../lib/route";
import { Dialog } from "../ui/Dialog";
import styles from "./Shortcuts.module.css";

const OTHERS = [
  ["Enter", "Send the message"],
  ["Shift+Enter", "Begin a line"],
  ["Esc", "Stop the answer, or leave an edit"],
  ["Ctrl+Enter", "Save an edit"],
  ["← → ↑ ↓", "Go from token to token in the tokens view, and from page to page under Engine"],
] as const;

const LIST: readonly (readonly [string, string])[] = [...Object.values(COMMANDS), ...OTHERS];
const OF_CHAT = new Set(["newChat", "search", "sidebar", "settings", "model", "write", "regenerate", "copyLast"]);

/** Listens to the keyboard for the whole page; "?" opens the list of all shortcuts. */
export function Shortcuts() {
  const [open, setOpen] = useState(false);
  useCommand("help", () => setOpen(true));
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      const command = event.defaultPrevented ? null : readKey(event);
      if (command === null) return;
      event.preventDefault();
      if (runCommand(command) || !OF_CHAT.has(command)) return;
      go("chat");
      setTimeout(() => runCommand(command), 100); // when the chat is drawn
    };
    document.addEventListener("keydown", press);
    return () => document.removeEventListener("keydown", press);
  }, []);
  return (
    <Dialog open={open} title="Keyboard shortcuts" onClose={() => setOpen(false)}>
      <dl className={styles.keys}>
        {LIST.map(([keys, what]) => (
          <div key={keys}>
            <dt>
              {keys.split("+").map((key) => (
                <kbd key={key}>{key}</kbd>
              ))}
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
    </Dialog>
  );
}
