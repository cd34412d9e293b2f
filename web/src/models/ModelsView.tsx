import { Boxes } from "lucide-react";
import { describeError } from "../api/client";
import { type ListedModel, shortName, useListedModels, useLoadedModels } from "../api/manage";
import { isDemo } from "../api/models";
import { formatBytes } from "../lib/format";
import { lazily } from "../lib/lazily";
import { Button } from "../ui/Button";
import { Empty, Notice } from "../ui/Notice";
import { Skeleton } from "../ui/Skeleton";
import { Discover } from "./Discover";
import { ImportForm } from "./ImportForm";
import { ModelRow } from "./ModelRow";
import styles from "./ModelsView.module.css";
import { PullForm } from "./PullForm";
import { PullList } from "./PullList";

const ModelDetails = lazily(() => import("./ModelDetails"));

/** Own models before those that come with mlxr, each by name. */
function compareNames(a: ListedModel, b: ListedModel): number {
  const [first, second] = [shortName(a.name), shortName(b.name)];
  return Number(isDemo(first)) - Number(isDemo(second)) || first.localeCompare(second, "en", { numeric: true });
}

/** The models on this machine, or all about the one that the address names. */
export default function ModelsView({ detail }: { detail: string }) {
  return <div className={styles.view}>{detail ? <ModelDetails name={detail} /> : <ModelList />}</div>;
}

function ModelList() {
  const listed = useListedModels();
  const loaded = useLoadedModels();
  const models = [...(listed.data ?? [])].sort(compareNames);
  const isFirst = listed.data !== undefined && models.every((model) => isDemo(shortName(model.name)));
  const discover = <Discover isFirst={isFirst} />;
  const held = (loaded.data ?? []).reduce((sum, model) => sum + model.size, 0);
  return (
    <>
      <header className={styles.head}>
        <h1>Models</h1>
        {listed.data && (
          <p className={styles.sum}>
            {models.length} on this machine, {loaded.data?.length ?? 0} loaded
            {held > 0 && ` in ${formatBytes(held)} of memory`}
          </p>
        )}
      </header>
      <div className={styles.add}>
        <PullForm />
        <ImportForm />
      </div>
      <PullList />
      {isFirst && discover}
      {listed.error && !listed.data && (
        <Notice
          kind="error"
          actions={
            <Button small onClick={() => void listed.refetch()}>
              Try again
            </Button>
          }
        >
          The list of models could not be read. {describeError(listed.error)}
        </Notice>
      )}
      {listed.isPending && <Skeleton bare />}
      {listed.data && models.length === 0 && (
        <Empty title="No model yet" icon={<Boxes aria-hidden="true" />}>
          <p>Pull one above by its name on Hugging Face, or import a file that is on this machine.</p>
        </Empty>
      )}
      {models.length > 0 && (
        <section className={styles.own}>
          <h2>On this machine</h2>
          <ul className={styles.list} aria-label="Models on this machine">
            {models.map((model) => (
              <ModelRow key={model.name} model={model} loaded={loaded.data?.find((one) => one.name === model.name)} />
            ))}
          </ul>
        </section>
      )}
      {!isFirst && discover}
    </>
  );
}
