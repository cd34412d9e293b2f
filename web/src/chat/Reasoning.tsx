import { ChevronRight } from "lucide-react";
import { useState } from "react";
import { formatSeconds } from "../lib/format";
import { Markdown } from "../ui/Markdown";
import styles from "./Reasoning.module.css";

/** What the model thought before it answered, folded, with the time it took. */
export function Reasoning({ text, ms, thinking }: { text: string; ms: number; thinking: boolean }) {
  const [open, setOpen] = useState(false);
  return (
    <div className={styles.reasoning}>
      <button type="button" aria-expanded={open} onClick={() => setOpen(!open)}>
        <ChevronRight aria-hidden="true" />
        {thinking ? "Thinks" : "Thought"} for {formatSeconds(ms / 1000)}
      </button>
      {open && (
        <div className={styles.text}>
          <Markdown text={text} growing={thinking} />
        </div>
      )}
    </div>
  );
}
