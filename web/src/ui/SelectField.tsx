import type { ReactNode } from "react";
import { Field } from "./Field";

interface Props<T extends string> {
  label: string;
  hint?: ReactNode;
  value: T;
  /** By value: what the person reads. */
  choices: Readonly<Record<T, string>>;
  onChange: (value: T) => void;
}

/** A labelled choice of one from a fixed list. */
export function SelectField<T extends string>({ label, hint, value, choices, onChange }: Props<T>) {
  return (
    <Field label={label} hint={hint}>
      {(ids) => (
        <select {...ids} value={value} onChange={(event) => onChange(event.target.value as T)}>
          {Object.entries<string>(choices).map(([name, text]) => (
            <option key={name} value={name}>
              {text}
            </option>
          ))}
        </select>
      )}
    </Field>
  );
}
