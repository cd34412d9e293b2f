import { type ReactNode, useId } from "react";
import styles from "./Field.module.css";

interface Props {
  label: string;
  /** A sentence below the label. */
  hint?: ReactNode;
  error?: string | null;
  /** Draws the control with the ids that tie it to its label and texts. */
  children: (ids: { id: string; "aria-describedby": string | undefined; "aria-invalid": boolean }) => ReactNode;
}

/** A labelled control. */
export function Field({ label, hint, error, children }: Props) {
  const id = useId();
  const told = [hint && `${id}-hint`, error && `${id}-error`].filter(Boolean).join(" ");
  return (
    <div className={styles.field}>
      <label htmlFor={id}>{label}</label>
      {children({ id, "aria-describedby": told || undefined, "aria-invalid": Boolean(error) })}
      {hint && (
        <p id={`${id}-hint`} className={styles.hint}>
          {hint}
        </p>
      )}
      {error && (
        <p id={`${id}-error`} className={styles.error} role="alert">
          {error}
        </p>
      )}
    </div>
  );
}

interface CheckProps {
  label: string;
  checked: boolean;
  onChange: (checked: boolean) => void;
}

/** A box to tick, with its label beside it. */
export function CheckField({ label, checked, onChange }: CheckProps) {
  return (
    <label className={styles.check}>
      <input type="checkbox" checked={checked} onChange={(event) => onChange(event.target.checked)} />
      {label}
    </label>
  );
}
