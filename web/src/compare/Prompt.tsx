import { Play, Square } from "lucide-react";
import { type ReactNode, useState } from "react";
import { useServerInfo } from "../api/manage";
import { listQuestions } from "../chat/questions";
import { Button } from "../ui/Button";
import { Field } from "../ui/Field";
import styles from "./CompareView.module.css";

interface Props {
  label: string;
  verb: string;
  isRunning: boolean;
  onAsk: (prompt: string) => void;
  onStop: () => void;
  note?: ReactNode;
  /** Further buttons beside that which asks. */
  beside?: ReactNode;
  children?: ReactNode;
}

/** The question, and the button that asks it or stops the answers. */
export function Prompt({ label, verb, isRunning, onAsk, onStop, note, beside, children }: Props) {
  const [typed, setTyped] = useState<string | null>(null);
  const usual = useServerInfo().data?.default_model;
  const prompt = typed ?? (usual === undefined ? "" : (listQuestions(usual)[0] ?? ""));
  const ask = () => {
    if (prompt.trim() && !isRunning) onAsk(prompt);
  };
  return (
    <form
      className={styles.ask}
      onSubmit={(event) => {
        event.preventDefault();
        ask();
      }}
    >
      <Field label={label}>
        {(ids) => (
          <textarea
            {...ids}
            rows={3}
            dir="auto"
            value={prompt}
            onChange={(event) => setTyped(event.target.value)}
            onKeyDown={(event) => {
              if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask();
            }}
          />
        )}
      </Field>
      {children}
      <div className={styles.row}>
        {isRunning ? (
          // With a key of its own: as one element, the click on it would go on to submit the form.
          <Button key="stop" onClick={onStop}>
            <Square aria-hidden="true" /> Stop
          </Button>
        ) : (
          <Button key="ask" kind="primary" type="submit" disabled={!prompt.trim()}>
            <Play aria-hidden="true" /> {verb}
          </Button>
        )}
        {beside}
        <p className={styles.note} role="status">
          {note}
        </p>
      </div>
    </form>
  );
}
