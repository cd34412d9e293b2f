import { ChevronRight } from "lucide-react";
import { formatSeconds } from "../lib/format";
import { useKept } from "../lib/kept";
import { Markdown } from "../ui/Markdown";
import styles from "./Reasoning.module.css";

interface Props {
  /** Of the message. */
  id: string;
  text: string;
  ms: number;
  thinking: boolean;
}

/** What the model thought before it answered, folded, with the time it took. */
export function Reasoning({ id, text, ms, thinking }: Props) {
  const [open, setOpen] = useKept(`thought ${id}`, false);
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
