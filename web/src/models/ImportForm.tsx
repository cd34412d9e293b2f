import { useMutation, useQueryClient } from "@tanstack/react-query";
import { FolderInput } from "lucide-react";
import { useState } from "react";
import { describeError } from "../api/client";
import { importModel, refreshModels } from "../api/manage";
import { Button } from "../ui/Button";
import { Field } from "../ui/Field";
import styles from "./PullForm.module.css";

/** Asks for the path of a model on the server's machine and gives it a name. */
export function ImportForm() {
  const queries = useQueryClient();
  const [path, setPath] = useState("");
  const add = useMutation({
    mutationFn: () => importModel(path.trim()),
    onSuccess: async () => {
      setPath("");
      await refreshModels(queries);
    },
  });
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        add.mutate();
      }}
    >
      <Field
        label="Import a file or folder"
        hint="A GGUF file or a folder from Hugging Face on the server's machine. It stays where it is."
        error={add.error ? describeError(add.error) : null}
      >
        {(ids) => (
          <div className={styles.row}>
            <input
              {...ids}
              value={path}
              onChange={(event) => setPath(event.target.value)}
              placeholder="/home/me/models/model.gguf"
              spellCheck={false}
              autoCapitalize="off"
              autoComplete="off"
            />
            <Button type="submit" disabled={!path.trim() || add.isPending}>
              <FolderInput aria-hidden="true" />
              {add.isPending ? "Importing…" : "Import"}
            </Button>
          </div>
        )}
      </Field>
    </form>
  );
}
