import { useId } from "react";
import { ModelPicker } from "../chat/ModelPicker";
import { NumberInput } from "../chat/NumberInput";
import { NUMBERS } from "../chat/settings";
import { Field } from "../ui/Field";
import styles from "./CompareView.module.css";
import type { Options } from "./options";

const KEYS = ["temperature", "seed", "maxTokens"] as const;

/** The model, and the numbers that matter most. */
export function OptionsForm({ options, onChange }: { options: Options; onChange: (options: Options) => void }) {
  const id = useId();
  return (
    <div className={styles.ask}>
      <Field label="Model">
        {({ id }) => (
          <ModelPicker id={id} value={options.model} onChange={(model) => onChange({ ...options, model })} />
        )}
      </Field>
      <div className={styles.numbers} id={id}>
        {KEYS.map((key) => {
          const field = NUMBERS.find((one) => one.key === key);
          return (
            field && (
              <NumberInput
                key={key}
                field={field}
                value={options[key]}
                onChange={(value) => onChange({ ...options, [key]: value })}
              />
            )
          );
        })}
      </div>
    </div>
  );
}
