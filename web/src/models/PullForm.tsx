import { useQueryClient } from "@tanstack/react-query";
import { Download } from "lucide-react";
import type { FormEvent } from "react";
import { refreshModels } from "../api/manage";
import { useStore } from "../lib/store";
import { Button } from "../ui/Button";
import { Field } from "../ui/Field";
import styles from "./PullForm.module.css";
import { startPull, typedName } from "./pulls";

/** Asks for the name of a model on the hub and pulls it. */
export function PullForm() {
  const queries = useQueryClient();
  const name = useStore(typedName);
  const setName = typedName.set;
  const pull = (event: FormEvent) => {
    event.preventDefault();
    const model = name.trim();
    if (!model) return;
    void startPull(model, () => void refreshModels(queries));
    setName("");
  };
  return (
    <form className={styles.form} onSubmit={pull}>
      <Field
        label="Pull a model"
        hint="A well-known name such as llama3.2:1b, or from Hugging Face hf.co/owner/repository, with :file or :type such as :Q4_K_M."
      >
        {(ids) => (
          <div className={styles.row}>
            <input
              {...ids}
              value={name}
              onChange={(event) => setName(event.target.value)}
              placeholder="llama3.2:1b"
              spellCheck={false}
              autoCapitalize="off"
              autoComplete="off"
            />
            <Button kind="primary" type="submit" disabled={!name.trim()}>
              <Download aria-hidden="true" />
              Pull
            </Button>
          </div>
        )}
      </Field>
    </form>
  );
}
