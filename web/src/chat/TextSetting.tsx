import { useEffect, useState } from "react";
import { Field } from "../ui/Field";
import styles from "./TextSetting.module.css";

interface Props {
  label: string;
  hint: string;
  value: string;
  rows: number;
  onChange: (text: string) => void;
  /** A sentence where the text is wrong. */
  check?: (text: string) => string | null;
  code?: boolean;
  placeholder?: string;
}

const WAIT_MS = 300;

/** A setting of several lines. It is kept a moment after the last key, and when the field is left. */
export function TextSetting({ label, hint, value, rows, onChange, check, code = false, placeholder }: Props) {
  const [text, setText] = useState(value);
  const [kept, setKept] = useState(value);
  if (value !== kept) {
    setKept(value);
    setText(value);
  }
  const keep = () => {
    if (text === value) return;
    setKept(text);
    onChange(text);
  };
  useEffect(() => {
    const timer = setTimeout(keep, WAIT_MS);
    return () => clearTimeout(timer);
  });
  return (
    <Field label={label} hint={hint} error={check?.(text) ?? null}>
      {(ids) => (
        <textarea
          {...ids}
          rows={rows}
          dir={code ? "ltr" : "auto"}
          className={code ? styles.code : undefined}
          spellCheck={!code}
          placeholder={placeholder}
          value={text}
          onChange={(event) => setText(event.target.value)}
          onBlur={keep}
        />
      )}
    </Field>
  );
}
