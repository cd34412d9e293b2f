import { ChevronRight } from "lucide-react";
import { formatCount } from "../lib/format";
import { useKept } from "../lib/kept";
import type { Passage } from "./passages";
import styles from "./Quoted.module.css";
import { namePassage } from "./quote";

/** The passages that went along with a question, folded: each with its number, its file and line, and its text. */
export function Quoted({ id, passages }: { id: string; passages: readonly Passage[] }) {
  const [open, setOpen] = useKept(`quoted ${id}`, false);
  if (passages.length === 0)
    return <p className={styles.none}>No passage of the folder shares a word with this question.</p>;
  return (
    <div className={styles.quoted}>
      <button type="button" aria-expanded={open} onClick={() => setOpen(!open)}>
        <ChevronRight aria-hidden="true" />
        {passages.length === 1 ? "1 passage" : `${formatCount(passages.length)} passages`}
      </button>
      {open && (
        <ol aria-label="Passages that went along">
          {passages.map((passage, index) => (
            // biome-ignore lint/suspicious/noArrayIndexKey: two passages may begin in one line.
            <li key={index}>
              <p className={styles.name}>
                [{index + 1}] {namePassage(passage)}
              </p>
              <p className={styles.text} dir="auto">
                {passage.text}
              </p>
            </li>
          ))}
        </ol>
      )}
    </div>
  );
}
