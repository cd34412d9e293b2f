import { type KeyboardEvent, useEffect, useRef, useState } from "react";
import { describeError } from "../api/client";
import { forgetKept, useKept } from "../lib/kept";
import { Button } from "../ui/Button";
import { Notice } from "../ui/Notice";
import styles from "./EditBox.module.css";

interface Props {
  /** Of the message; what is written stays under it while the message is scrolled away. */
  id: string;
  label: string;
  text: string;
  onCancel: () => void;
  /** By the button's text: what it does with the new text. The first one is also done by Ctrl+Enter. */
  actions: Record<string, (text: string) => void | Promise<void>>;
}

/** Writes a new version of a message. */
export function EditBox({ id, label, text, onCancel, actions }: Props) {
  const name = `edit ${id}`;
  const [value, setValue] = useKept(name, text);
  const [problem, setProblem] = useState("");
  const [isRunning, setIsRunning] = useState(false);
  const area = useRef<HTMLTextAreaElement>(null);
  useEffect(() => area.current?.focus(), []);
  const close = () => {
    onCancel();
    forgetKept(name);
  };
  const run = async (action: (text: string) => void | Promise<void>) => {
    setProblem("");
    setIsRunning(true);
    try {
      await action(value);
      close();
    } catch (error) {
      setProblem(describeError(error));
      setIsRunning(false);
    }
  };
  const press = (event: KeyboardEvent) => {
    const [first] = Object.values(actions);
    if (event.key === "Escape") close();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && first && !isRunning) void run(first);
  };
  return (
    <div className={styles.edit}>
      <textarea
        ref={area}
        aria-label={label}
        dir="auto"
        value={value}
        onChange={(event) => setValue(event.target.value)}
        onKeyDown={press}
      />
      {problem && <Notice kind="error">{problem}</Notice>}
      <div className={styles.row}>
        <Button onClick={close}>Cancel</Button>
        {Object.entries(actions).map(([name, action], index) => (
          <Button
            key={name}
            kind={index === 0 ? "primary" : "plain"}
            disabled={isRunning}
            onClick={() => void run(action)}
          >
            {name}
          </Button>
        ))}
      </div>
    </div>
  );
}
