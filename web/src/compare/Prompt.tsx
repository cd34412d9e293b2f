import { History, Play, Square } from "lucide-react";
import { type ReactNode, useState } from "react";
import { useServerInfo } from "../api/manage";
import { listQuestions } from "../chat/questions";
import { savedStore } from "../lib/saved";
import { useStore } from "../lib/store";
import { Button } from "../ui/Button";
import { Field } from "../ui/Field";
import { Menu, MenuItem } from "../ui/Menu";
import styles from "./CompareView.module.css";

const MOST_EARLIER = 10;
const SHOWN_CHARACTERS = 60;

/** What was compared in this browser before, the last question first. */
const earlier = savedStore<readonly string[]>("compared", [], isTexts);

function isTexts(value: unknown): value is readonly string[] {
  return Array.isArray(value) && value.every((one) => typeof one === "string");
}

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
  const asked = useStore(earlier);
  const usual = useServerInfo().data?.default_model;
  const prompt = typed ?? (usual === undefined ? "" : (listQuestions(usual)[0] ?? ""));
  const ask = () => {
    if (!prompt.trim() || isRunning) return;
    earlier.set([prompt, ...asked.filter((one) => one !== prompt)].slice(0, MOST_EARLIER));
    onAsk(prompt);
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
            // From here on the text is the reader's: a question that comes late would end up within it.
            onFocus={() => setTyped(prompt)}
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
        {asked.length > 0 && (
          <Menu label="Earlier questions" icon={<History />} small={false}>
            {asked.map((question) => (
              <MenuItem key={question} onSelect={() => setTyped(question)}>
                {question.length > SHOWN_CHARACTERS ? `${question.slice(0, SHOWN_CHARACTERS)}…` : question}
              </MenuItem>
            ))}
            <MenuItem danger onSelect={() => earlier.set([])}>
              Forget them
            </MenuItem>
          </Menu>
        )}
        <p className={styles.note} role="status">
          {note}
        </p>
      </div>
    </form>
  );
}
