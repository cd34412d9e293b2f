import { useState } from "react";
import { Field } from "../ui/Field";
import { type NumberField, readNumber } from "./settings";

interface Props {
  field: NumberField;
  value: number | null;
  /** What holds while the field is empty, if that is known. */
  usual?: number | undefined;
  onChange: (value: number | null) => void;
}

/** What an empty field means where no number says it. */
const OPEN: Partial<Record<NumberField["key"], string>> = { maxTokens: "no limit", seed: "drawn" };

/** A number of the sampling; empty leaves it as usual, which the empty field shows. What is wrong stays in the field and is not kept. */
export function NumberInput({ field, value, usual, onChange }: Props) {
  const [text, setText] = useState(write(value));
  const [kept, setKept] = useState(value);
  if (value !== kept) {
    setKept(value);
    setText(write(value));
  }
  const read = readNumber(text, field);
  const type = (typed: string) => {
    setText(typed);
    const number = readNumber(typed, field);
    if (typeof number === "string") return;
    setKept(number);
    onChange(number);
  };
  return (
    <Field label={field.label} error={typeof read === "string" ? read : null}>
      {(ids) => (
        <input
          {...ids}
          inputMode={field.step === 1 ? "numeric" : "decimal"}
          autoComplete="off"
          placeholder={usual === undefined ? (OPEN[field.key] ?? "auto") : String(usual)}
          title={field.hint}
          value={text}
          onChange={(event) => type(event.target.value)}
        />
      )}
    </Field>
  );
}

function write(value: number | null): string {
  return value === null ? "" : String(value);
}
